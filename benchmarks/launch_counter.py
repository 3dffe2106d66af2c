"""Count kernels that operators start on a device, the bytes that they touch, and the host's waits.

    with LaunchCounter(is_there) as counter:
        step(...)
    counter.found["step"].launches

`is_there` returns whether a tensor is on the device: meta tensors that represent it, or all CPU tensors. An operator
counts as one kernel, a view as none, and an operator over lists as ATen's `multi_tensor_apply` launches. Operators that
libraries split further (matrix products, sorts, two-stage sums) start more kernels than counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxcomp.compat.operators import bare_name, is_view, named_arguments, takes_lists, written_arguments

_aten = torch.ops.aten

CHUNK, MOST_CHUNKS = 65_536, 320  # ATen/native/cuda/MultiTensorApply.cuh
MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Maximum tensors per list and kernel, by number of lists; from the same file."""

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "detach"}
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
"""In-place operators that do not read their target."""


@dataclass(slots=True)
class Tally:
    launches: int = 0
    touched_bytes: int = 0
    """Bytes of device memory; each tensor counts once per kernel that reads or writes it."""
    reads: int = 0
    """Reads of device values, for which the host waits."""
    copies: int = 0
    """Copies between device and pageable host memory, for which the host waits."""


class LaunchCounter(TorchDispatchMode):
    """Counts operators of a thread. Device values are read as 1."""

    def __init__(self, is_there: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._is_there = is_there
        self.kind = "step"
        """Kind of the operators that follow."""
        self.found: defaultdict[str, Tally] = defaultdict(Tally)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Count a kernel that touches each of these tensors once."""
        self.found[self.kind].launches += 1
        self.found[self.kind].touched_bytes += sum(map(_bytes, tensors))

    @contextmanager
    def counting(self, kind: str) -> Generator[None]:
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        tensors = [each for each in pytree.tree_leaves((args, given)) if isinstance(each, Tensor)]
        there = [each for each in tensors if self._is_there(each)]
        if func is _aten._local_scalar_dense.default and there:
            self.found[self.kind].reads += 1
            return 1.0 if there[0].is_floating_point() else there[0].dtype is torch.bool or 1
        if func is _aten.copy_.default and len(there) == 1:
            self._copied(there[0])
            return args[0]
        if func.namespace == "fxcomp":  # fxcomp's operators consist of others
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **given)
        result = None if bare_name(func).startswith("_fused_") else func(*args, **given)
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and self._is_there(each)]
        if func is _aten._to_copy.default and bool(there) != bool(made):
            self._copied((there or made)[0])
        elif there or made:
            self._count(func, args, given, there, made)
        return result

    def _copied(self, tensor: Tensor) -> None:
        self.found[self.kind].copies += 1
        self.found[self.kind].touched_bytes += _bytes(tensor)

    def _count(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], there: list[Tensor], made: list[Tensor]
    ) -> None:
        name = bare_name(func)
        if is_view(func) or name in _ALLOCATIONS or not any(each.numel() for each in (*there, *made)):
            return
        named = named_arguments(func, args, kwargs)
        written = [named.get(key) for key in written_arguments(func)]
        targets = [each for each in pytree.tree_leaves(written) if isinstance(each, Tensor)]
        is_blind = name in _OVERWRITES or "out" in written_arguments(func)
        read = {id(each): each for each in there if not (is_blind and any(each is one for one in targets))}
        fresh = [each for each in made if not any(each is one for one in targets)]
        tally = self.found[self.kind]
        tally.touched_bytes += sum(map(_bytes, (*read.values(), *targets, *fresh)))
        tally.launches += _list_launches(name, named, made if not targets else []) if takes_lists(func) else 1


def _list_launches(name: str, named: dict[str, Any], made: Sequence[Tensor]) -> int:
    """Count the kernels of an operator over lists: one per tensor if the lists have different layouts."""
    values = [value for value in named.values() if isinstance(value, list | tuple) and value]
    lists = [value for value in values if all(isinstance(each, Tensor) for each in value)]
    first = lists[0]
    if name.startswith("_fused_"):
        lists = [each for each in lists if each[0].dim() or not first[0].dim()]  # counters are read by pointer
    elif not _lie_alike(lists):
        return sum(1 for each in first if each.numel())
    if name == "_foreach_norm":
        return 2 + multi_tensor_launches([each.numel() for each in first], 1)  # zeros before, the sum of chunks after
    return multi_tensor_launches([each.numel() for each in first], len(lists) + bool(made))


def _lie_alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    def ways(row: Sequence[Tensor]) -> list[Any]:
        return [(tuple(each.shape), each.stride()) for each in row]

    rows = [row for row in lists if len(row) == len(lists[0])]
    one_type = all(len({each.dtype for each in row}) == 1 for row in rows)
    return one_type and all(ways(row) == ways(rows[0]) for row in rows)


def multi_tensor_launches(sizes: Sequence[int], lists: int) -> int:
    """Count the kernels for lists of tensors of these sizes, as ATen fills kernel arguments."""
    most, launches, tensors, chunks = MOST_TENSORS[min(lists, 5)], 0, 0, 0
    for size in filter(None, sizes):
        tensors += 1
        last = -(-size // CHUNK) - 1
        for chunk in range(last + 1):
            chunks += 1
            if chunks == MOST_CHUNKS or (tensors == most and chunk == last):
                launches, chunks = launches + 1, 0
                tensors = 0 if chunk == last else 1
    return launches + bool(chunks)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
