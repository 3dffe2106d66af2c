"""What reaches a threshold, in a fixed number of slots: the payload of `fxcomp/compressors/survivors.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.survivors import capacities
from fxcomp.compressors.topk import counts
from fxcomp.compressors.triton import sparse
from fxcomp.compressors.triton.select import Layout, layout_of


def layout(segments: tuple[int, ...], ratio: float, device: torch.device) -> Layout:
    return layout_of(segments, counts(segments, ratio), capacities(segments, ratio), device, has_counts=True)


def decode(payloads: Tensor, ranks: int, segments: tuple[int, ...], ratio: float, out: Tensor) -> bool:
    ours = layout(segments, ratio, out.device)
    return sparse.decode(payloads, ranks, segments, capacities(segments, ratio), ours, out)
