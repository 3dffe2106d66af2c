"""Cut a bucket into blocks and put it together again, for references that work block by block.

    segments (5, 3), block 4:   a b c d e | x y z   -->   a b c d
                                                          e 0 0 0
                                                          x y z 0

No block holds values of two segments; the last block of a segment may be short and is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def count_blocks(segments: Sequence[int], block: int) -> int:
    return sum(-(-size // block) for size in segments)


def split(flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split_with_sizes(flat, list(sizes))


def to_blocks(flat: Tensor, segments: Sequence[int], block: int) -> Tensor:
    """One row a block."""
    rows = [pad(piece, (0, -len(piece) % block)).view(-1, block) for piece in split(flat, segments)]
    return torch.cat([flat.new_empty(0, block), *rows])


def from_blocks(rows: Tensor, segments: Sequence[int], block: int) -> Tensor:
    """Undo `to_blocks`."""
    pieces = split(rows, [-(-size // block) for size in segments])
    return torch.cat(
        [rows.new_empty(0), *(piece.flatten()[:size] for piece, size in zip(pieces, segments, strict=True))]
    )


def block_sizes(segments: Sequence[int], block: int, *, device: torch.device) -> Tensor:
    """Count the values of each row that are no filling, as a column."""
    sizes = torch.full((count_blocks(segments, block), 1), block, dtype=torch.int64, device=device)
    end = 0
    for size in segments:
        end += count_blocks((size,), block)
        if size % block:
            sizes[end - 1].fill_(size % block)
    return sizes
