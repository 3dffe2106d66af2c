"""Recognise the collectives of a user's loss function while it is traced."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from fxcomp.compat.operators import Operator
from fxcomp.compat.source_lines import frames

OBJECTS = "a collective of Python objects"


def is_functional_collective(target: Operator) -> bool:
    """Ask if a collective's result is new, and to be waited for."""
    return target.namespace != "c10d"


def reduction(boxed: Any) -> str | None:
    """Name a boxed reduction operation; None for one with a factor."""
    name: str = dist.ReduceOp.RedOpType(boxed.op()).name.lower()
    return None if name == "premul_sum" else name


def finished_work(target: Operator, args: Sequence[Any]) -> Any:
    """Make what an in-place collective returns when it is done: its outputs, and work that is finished."""
    from torch._C._distributed_c10d import FakeWork

    returns = len(target._schema.returns)
    if returns == 0:
        return None
    work = FakeWork().boxed()
    return work if returns == 1 else (args[0], work)


def carries_objects() -> bool:
    """Ask if a collective of Python objects is being called, which sends their sizes first."""
    here, codes = dist.distributed_c10d.__file__, (frame.f_code for frame in frames(sys._getframe(1)))
    return any(code.co_filename == here and "_object" in code.co_name for code in codes)


@contextmanager
def without_hidden_communication(refuse: Callable[[str], Any]) -> Generator[None]:
    """Call `refuse` with what was tried where torch.distributed would communicate by other ways than operators."""
    c10d: Any = dist.distributed_c10d
    hidden = {
        "_object_to_tensor": OBJECTS,
        "_tensor_to_object": OBJECTS,
        "_new_group_with_tag": "a new process group",
    }
    before = {name: getattr(c10d, name) for name in hidden}
    try:
        for name, what in hidden.items():
            setattr(c10d, name, partial(_refused, refuse, what))
        yield
    finally:
        for name, function in before.items():
            setattr(c10d, name, function)


def _refused(refuse: Callable[[str], Any], what: str, *_: Any, **__: Any) -> Any:
    return refuse(what)
