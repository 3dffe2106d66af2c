"""What reaches a threshold, in a fixed number of slots: the payload of `fxcomp/compressors/survivors.py`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.survivors import capacities, section_bytes
from fxcomp.compressors.topk import counts
from fxcomp.compressors.triton.blocks import is_aligned
from fxcomp.compressors.triton.select import Layout, Section, add_up, first_and_last_tiles, layout_of


@cache
def layout(segments: tuple[int, ...], ratio: float, device: torch.device) -> Layout:
    sections: list[Section] = []
    end = 0
    tiles = first_and_last_tiles(segments)
    for size, k, slots, (first, last) in zip(
        segments, counts(segments, ratio), capacities(segments, ratio), tiles, strict=True
    ):
        places_at = end + 4 + 4 * slots
        sections.append(Section(size, k, slots, first, last, end + 4, places_at, places_at // 4))
        end += section_bytes(slots)
    return layout_of(sections, segments, device, is_compact=False)


def decode(payloads: Tensor, ranks: int, segments: tuple[int, ...], ratio: float, out: Tensor) -> bool:
    if not is_aligned(payloads):
        return False
    ours = layout(segments, ratio, out.device)
    add_up(payloads, payloads.view(torch.int32), ranks, ours, out)
    return True
