"""Leave alone what is owed to parameters that no rank has used, under `find_unused_parameters=True`.

DDP keeps the `.grad` of such a parameter as it is, whatever its bucket brings: what error feedback would send of it now
were lost. The hook is not told which they are. A gradient that is zero on every rank is treated as theirs: what it is
owed waits, and its mean is zero. So nothing is lost if the parameter was used after all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxcomp.frontends.hook_program import DdpBucket, Layout
from fxcomp.site import Site
from fxcomp.state.gradient_state import GradientState

FIRST = 256
"""So many elements tell of most gradients that they are not zero."""


@dataclass(slots=True)
class Unused:
    """The gradients of one backward pass that are zero here, with their residuals and what they were owed before it."""

    state: GradientState
    residuals: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    owed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def look_at(self, bucket: DdpBucket, views: list[Tensor]) -> None:
        """Keep what belongs to the zeros of a bucket, before it is compressed. `views` has the buffer first."""
        for name, gradient in zip(bucket.names, views[1:], strict=True):
            if not _is_zero(gradient):
                continue
            self.residuals[name] = [piece.values.clone() for piece in self.state.residuals.slices.get(name, ())]
            if name in self.state.owed:
                self.owed[name] = self.state.owed[name]

    def put_back(self, layout: Layout, buffers: list[Tensor], site: Site) -> None:
        """Let what is zero on all ranks be owed again, and bring nothing; every rank calls it after the pass."""
        names = [name for bucket in layout for name in bucket.names]
        used = torch.tensor([name not in self.residuals for name in names], dtype=torch.uint8, device=site.device)
        site.transport.all_reduce(used, "world", "main", "max").wait()
        somewhere = {name for name, flag in zip(names, used.cpu(), strict=True) if bool(flag)}
        for bucket, buffer in zip(layout, buffers, strict=True):
            for name, view in zip(bucket.names, bucket.with_views(buffer)[1:], strict=True):
                if name not in somewhere:
                    view.zero_()
                    self._put_back(name)

    def _put_back(self, name: str) -> None:
        for piece, before in zip(self.state.residuals.slices.get(name, ()), self.residuals[name], strict=True):
            piece.values.copy_(before)
        if name in self.owed:
            self.state.owed[name] = self.owed[name]


def _is_zero(gradient: Tensor) -> bool:
    flat = gradient.view(-1)
    return not bool(flat[:FIRST].any()) and not bool(flat.any())
