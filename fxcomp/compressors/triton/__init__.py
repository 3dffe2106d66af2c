"""Triton kernels for CUDA: `<name>.py` here makes the compressor `<name>` faster, as `csrc/<name>.cpp` does.

A module holds `encode`, `decode` and `propose`, whichever it has kernels for; `dispatch.py` finds it by the file's name
and every file can be imported where Triton is not installed. What a mode or a budget offers has kernels, and
cmax, for momenta; other compressors run their references on the device.

    blocks       int8, int4, int2, sign         a codec of three functions: a block's scale, a code, its value
    bf16         bf16                           a codec of two functions: a code, its value
    send, sparse topk, sidco                    a policy, which finds a magnitude for each segment to send from

So a fast compressor is one small file: for a quantiser, copy `sign.py`; for a sparsifier, `topk.py`. powersgd
and cmax have kernels of their own.

- Many parameters in one launch: a table on the device says where each tile of a bucket lies (`tiles.py`), made once
  for each division of a bucket. Nothing waits for the device or asks it for a size.
- Encoding adds the residual, compresses and writes the new residual in one kernel; decoding adds up all ranks and
  writes the mean in one kernel.
- What selects by size (`send.py`) keeps its decisions on the device: counts, thresholds and places.
- Quantisers take all pieces of a bucket in one launch, so that launches do not grow with ranks.
- The payload is that of the reference. So are the bits: division rounds correctly (`div_rn`), multiplication and
  addition stay apart (`launch`), sums have the reference's order, and random bits come from the same counters. Where a
  file promises less, it says so.
- The bits are those of the reference on the CPU. On a GPU, torch divides by a number by multiplying with its inverse,
  so a reference that runs there may differ in last bits: the ranks of a job all use kernels, or none does.

On an H100 they have the bits of the references, and quantisers run at the speed of a copy (docs/benchmarks/gpu.md).
Tests run them in Triton's interpreter on the CPU, and compile them for compute capability 9.0.
"""
