"""Triton kernels for CUDA: `<name>.py` accelerates the compressor `<name>`, as `csrc/<name>.cpp` does on the CPU.

A module defines `encode`, `decode` or `propose` if it has kernels for them, and can be imported without Triton. Other
compressors run their references on the device.

    blocks       int8, int4, int2, sign         a codec of three functions: a block's scale, a code, its value
    bf16         bf16                           a codec of two functions: a code, its value
    send, sparse topk, sidco                    a policy that chooses each segment's smallest magnitude to send

For a new quantiser copy `sign.py`, for a sparsifier `topk.py`.

- A launch covers all parameters of a bucket: a device table locates their tiles (`tiles.py`).
- The host never waits for the device: counts, thresholds and places (indices in a segment) stay on the device.
- Payloads have the bits of the reference on the CPU, unless a file states a difference. Division rounds correctly
  (`div_rn`), multiplication and addition are not fused (`launch`).
- On a GPU a reference may differ in the last bits, because torch replaces division by a scalar with multiplication by
  its inverse. So either all ranks of a job use kernels, or none.

Tests run the kernels in Triton's interpreter and compile them for compute capability 9.0.
"""
