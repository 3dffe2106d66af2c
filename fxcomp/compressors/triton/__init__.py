"""Triton kernels for CUDA: `<name>.py` accelerates the compressor `<name>`, as `csrc/<name>.cpp` does on the CPU.

A module defines `encode`, `decode` and `propose` as far as it has kernels. Every file can be imported without Triton.
The compressors of modes and budgets have kernels, and cmax; others run their references on the device.

    blocks       int8, int4, int2, sign         a codec of three functions: a block's scale, a code, its value
    bf16         bf16                           a codec of two functions: a code, its value
    send, sparse topk, sidco                    a policy that chooses each segment's smallest magnitude to send

For a new quantiser copy `sign.py`, for a sparsifier `topk.py`.

- Many parameters share a launch: a device table locates the tiles of a bucket (`tiles.py`).
- Nothing synchronises with the device. Selection keeps counts, thresholds and places there.
- Payloads have the bits of the reference on the CPU, unless a file states a difference. Division rounds correctly
  (`div_rn`), multiplication and addition are not fused (`launch`).
- A reference on a GPU may differ in last bits, because torch divides by a number there by multiplying with its inverse.
  So either all ranks of a job use kernels, or none.

Tests run the kernels in Triton's interpreter and compile them for compute capability 9.0. Speed:
docs/benchmarks/gpu.md.
"""
