"""Find the modules of a model under fully_shard, and refuse those whose gradients nobody else can average."""

from __future__ import annotations

from torch import nn

from fxcomp import compat
from fxcomp.errors import BadOption, Unsupported
from fxcomp.plan.kinds import check_is_trainable


def checked_modules(model: nn.Module, caller: str) -> list[compat.ShardedModule]:
    """List the modules that fully_shard was called for, which `caller` is told of.

    Raises BadOption where there is none, and Unsupported.
    """
    modules = compat.sharded_modules(model)
    if not modules:
        raise BadOption(
            f"{caller} has found nothing that is sharded and trained in this model.\n"
            "  Call fully_shard for it first; models that are not sharded take fxcomp.ddp_hook or fxcomp.compile_step."
        )
    for module in modules:
        _check(module, caller)
    first = compat.group_ranks(modules[0].shard_group)
    if any(compat.group_ranks(module.shard_group) != first for module in modules):
        raise Unsupported(
            "modules of this model are sharded over different ranks.\n  Pass one mesh to every fully_shard."
        )
    return modules


def called(module: compat.ShardedModule) -> str:
    """Name a module in a message."""
    return f"module {module.name!r}" if module.name else "the outermost module"


def _check(module: compat.ShardedModule, caller: str) -> None:
    if module.is_replicated:
        raise Unsupported(
            f"{called(module)} is sharded over a mesh of two dimensions: fully_shard sums over its replicas, dense,"
            " before anything can be compressed.\n"
            '  Call fully_shard(..., mesh=mesh["shard"]), and fxcomp.average_replicas(model, mesh["replicate"]).'
        )
    for name, parameter, shape in zip(module.names, module.parameters, module.whole_shapes, strict=True):
        if 0 in shape:
            raise Unsupported(
                f"the parameter {name!r} has no elements, {list(shape)}: fully_shard raises an error when it reduces"
                f" its gradient.\n  Call .requires_grad_(False) for it before fully_shard and {caller}."
            )
        if parameter.is_meta:
            raise Unsupported(
                f"the parameter {name!r} has no values yet (device meta).\n"
                f"  Call model.to_empty(device=...) and initialise it before {caller}."
            )
        check_is_trainable(name, parameter.dtype)
