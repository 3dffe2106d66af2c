"""Average a sparse gradient over all ranks: gather its rows, and add them in rank order.

The backend's sum is not used: with gloo it corrupts the heap, and raises if a rank has no rows (pytorch/pytorch#87497).
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from fxcomp.runtime.transfers import Pattern, Transfer
from fxcomp.site import Site


class SparseMean:
    """Pending mean of a sparse gradient. Every rank constructs one, and calls `finish`."""

    def __init__(self, gradient: Tensor, site: Site) -> None:
        """Exchange row counts, and start to send rows as bytes, padded to the largest count."""
        self._mine = gradient.div_(site.ranks.world_size).coalesce()
        rows, ranks = self._as_bytes(), site.ranks.world_size
        everyone = site.gather_numbers("how many rows of a sparse gradient there are", [len(rows)])
        self._counts = [int(count) for (count,) in everyone]
        sent = rows.new_zeros(max(self._counts), rows.shape[1])
        sent[: len(rows)] = rows
        self._out, self.sent_bytes = sent.new_empty(ranks * sent.numel()), sent.numel()
        transfer = Transfer(Pattern.ALL_GATHER, sent.view(-1), self._out, ranks, "world")
        self._work = site.transport.start(transfer) if sent.numel() else None

    def finish(self) -> Tensor:
        """Wait for the rows of all ranks, and return the coalesced mean."""
        if self._work is None:
            return self._mine
        self._work.wait()
        rows = self._out.view(len(self._counts), max(self._counts), -1)
        return reduce(torch.add, [self._read(rows[k, :count]) for k, count in enumerate(self._counts)]).coalesce()

    def _as_bytes(self) -> Tensor:
        """Return one row per index, shape (rows, bytes)."""
        indices, values = torch.stack(list(self._mine.indices()), 1), self._mine.values()
        flat = values.reshape(len(values), values.shape[1:].numel()).contiguous()
        return torch.cat([indices.view(torch.uint8), flat.view(torch.uint8)], 1)

    def _read(self, rows: Tensor) -> Tensor:
        values = self._mine.values()
        width = 8 * self._mine.sparse_dim()
        indices = rows[:, :width].contiguous().view(torch.int64).t()
        flat = rows[:, width:].contiguous().view(values.dtype).view(len(rows), *values.shape[1:])
        return torch.sparse_coo_tensor(  # pyright: ignore[reportUnknownMemberType]  # untyped
            indices, flat, self._mine.shape, is_coalesced=True, check_invariants=False
        )
