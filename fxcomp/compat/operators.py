"""Facts about ATen operators and collectives, from schemas, tags and flop formulas."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from fxcomp.compat.source_lines import frames
from fxcomp.compat.symbols import attributes_instead, has_symbols, size_hint

Operator = OpOverload[..., Any]

# Kinds


def is_operator(target: Any) -> TypeGuard[Operator]:
    return isinstance(target, OpOverload)


def is_higher_order(target: Any) -> bool:
    return isinstance(target, HigherOrderOperator)


def is_profiler(target: Any) -> bool:
    """Return whether an operator marks a range for the profiler."""
    return isinstance(target, OpOverload) and target.namespace == "profiler"


_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@cache
def communicates(target: Any) -> bool:
    """Return whether an operator sends, receives, or waits for communication."""
    return isinstance(target, OpOverload) and (
        target.namespace in _COLLECTIVE_NAMESPACES or target._schema.name == "fxcomp::exchange"
    )


@cache
def is_pointwise(target: Operator) -> bool:
    return torch.Tag.pointwise in target.tags


@cache
def is_bound_by_memory(target: Operator) -> bool:
    """Return whether torch tags an operator as pointwise or reduction."""
    return torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags


# Arguments and results


def bare_name(target: Operator) -> str:
    return target._schema.name.partition("::")[2]


@cache
def places_of_arguments(target: Operator) -> Mapping[str, int]:
    return {argument.name: place for place, argument in enumerate(target._schema.arguments)}


def named_arguments(target: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Map names to the given arguments, without defaults."""
    return {**dict(zip(places_of_arguments(target), args, strict=False)), **kwargs}


@cache
def written_arguments(target: Operator) -> tuple[str, ...]:
    """Return the arguments that an operator writes into, except a fused optimizer's `grads`."""
    written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tuple(name for name in written if name != "grads")


@cache
def is_in_place(target: Operator) -> bool:
    return target._schema.is_mutable


def functional_operator(target: Operator) -> Operator | None:
    """Return the out-of-place form of an in-place operator, such as add for add_, or None."""
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    overload = target._overloadname
    found = [getattr(packet, each, None) for each in (overload, f"Tensor_{overload}")]
    # pow_.Scalar has the argument types of pow.Tensor_Scalar, not of pow.Scalar.
    return next((each for each in found if each is not None and _takes(each) == _takes(target)), None)


def _takes(target: Operator) -> list[str]:
    return [str(argument.type) for argument in target._schema.arguments]


@cache
def is_view(target: Operator) -> bool:
    """Return whether an operator only returns aliases of its arguments."""
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def takes_lists(target: Operator) -> bool:
    """Return whether an operator's first argument is a list of tensors."""
    arguments = target._schema.arguments
    return bool(arguments) and str(arguments[0].type) == "List[Tensor]"


@cache
def has_results(target: Operator) -> bool:
    return bool(target._schema.returns)


@cache
def moves_tensors(target: Operator) -> bool:
    """Return whether an operator returns or writes tensors. Other operators return sizes or one value."""
    makes = any("Tensor" in str(result.type) for result in target._schema.returns)
    return makes or target._schema.is_mutable


def has_effect(node: Node) -> bool:
    """Return whether a node must stay in the graph even if its result is unused."""
    if node.op in ("placeholder", "output"):
        return True
    target = node.target
    return isinstance(target, OpOverload) and (target._schema.is_mutable or is_random(target) or checks_values(node))


_CHECKS = frozenset(
    """
    _assert_async _assert_scalar _linalg_check_errors sym_constrain_range sym_constrain_range_for_size
    linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex linalg_ldl_factor_ex _linalg_solve_ex linalg_eig linalg_eigvals
    _linalg_eigvals _linalg_eigh _linalg_svd linalg_pinv linalg_lstsq cholesky cholesky_inverse lu_unpack
    index index_put index_select index_add index_copy index_fill index_reduce gather scatter scatter_add scatter_reduce
    take put masked_scatter embedding embedding_bag _embedding_bag _embedding_bag_forward_only repeat_interleave
    nll_loss_forward nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward binary_cross_entropy _ctc_loss
    bincount histc histogram segment_reduce max_unpool2d max_unpool3d fractional_max_pool2d fractional_max_pool3d
    searchsorted _pack_padded_sequence _validate_sparse_coo_tensor_args
    """.split()  # noqa: SIM905  # a table of one word each
)
"""ATen operators that raise for some values: an index out of range, a singular matrix."""

_DIVIDES = frozenset({"div", "floor_divide", "remainder", "fmod"})
"""Operators that raise on integer division by zero."""


def checks_values(node: Node) -> bool:
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
    return bare_name(target) in _CHECKS or (is_whole and bare_name(target) in _DIVIDES)


# Random numbers


def is_random(target: Any) -> bool:
    """Return whether an operator is tagged as random. Attention is tagged even without dropout.

    Return False for operators with a seed argument, such as attention's backward pass, because they repeat draws.
    """
    is_tagged = isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    return is_tagged and "philox_seed" not in places_of_arguments(target)


def draws(node: Node) -> bool:
    """Return whether a node draws from a generator. fxcomp's operators only read or set a generator's state."""
    if not is_random(node.target) or cast("Operator", node.target).namespace == "fxcomp":
        return False
    target = cast("Operator", node.target)
    defaults = {argument.name: argument.default_value for argument in target._schema.arguments}
    given = defaults | named_arguments(target, node.args, node.kwargs)
    return not (given.get("dropout_p") == 0 or given.get("train") is False or given.get("training") is False)


# Floating-point operations


@cache
def has_flop_formula(target: Any) -> bool:
    return _flop_formula(target) is not None


@cache
def _flop_formula(target: Any) -> Callable[..., Any] | None:
    from torch.utils.flop_counter import flop_registry

    packet = getattr(target, "overloadpacket", target)
    grouped = (torch.ops.aten._grouped_mm, torch.ops.aten._scaled_grouped_mm)
    return _grouped_flops if packet in grouped else flop_registry.get(packet)


def _grouped_flops(one: Any, _: Any, *__: Any, out_val: Any, **___: Any) -> Any:
    """Count flops of a grouped matmul. Each output value is a sum over the inner dimension or one group's part."""
    groups = out_val.shape[0] if one.dim() == 2 and out_val.dim() == 3 else 1
    return 2 * out_val.numel() * one.shape[-1] // groups


def flops(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """Count the flops of a call on fake values; 0 without a formula."""
    count = _flop_formula(target)
    if count is None:
        return 0.0
    try:
        return float(size_hint(count(*args, **kwargs, out_val=out)))
    except (TypeError, ValueError, AssertionError, AttributeError):
        return 0.0


def multiplies_in_tf32(*, is_convolution: bool) -> bool:
    """Return whether a GPU may round the factors of a float32 product to TF32."""
    backends: Any = torch.backends
    return (backends.cudnn.conv if is_convolution else backends.cuda.matmul).fp32_precision == "tf32"


@contextmanager
def kernels_instead(
    kernels: Mapping[str, Callable[..., Any]], key: str, *, with_keyset: bool = False
) -> Generator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")  # about overriding
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, with_keyset=with_keyset)
        yield
    finally:
        library._destroy()


@contextmanager
def symbolic_products(inputs: Iterable[Any]) -> Generator[None]:
    """Keep matmul's sizes symbolic while a function is traced, also in linear and einsum.

    Until torch 2.12 the C++ matmul requires plain sizes; torch's Python decomposition does not.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if torch.__version__ >= "2.13" or not any(map(has_symbols, tensors)):
        yield
        return
    kernel = {"matmul": _matmul}
    with kernels_instead(kernel, "AutogradCPU"), kernels_instead(kernel, "AutogradCUDA"):
        yield


def _matmul(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if has_symbols(one) or has_symbols(other):
        from torch._decomp.decompositions import matmul

        return matmul(one, other)
    return torch.ops.aten.matmul.default.decompose(one, other)


class _Direct:
    """Operator namespace that caches attributes."""

    def __init__(self, find: Callable[[str], Any]):
        self._find = find

    def __getattr__(self, name: str) -> Any:
        found = self._find(name)
        setattr(self, name, found)
        return found


def _overloads(name: str) -> _Direct:
    packet = getattr(torch.ops.aten, name)

    def find(overload: str) -> Any:
        operator = getattr(packet, overload)
        return getattr(operator, "_op", operator)

    return _Direct(find)


direct_aten = _Direct(_overloads)
"""`torch.ops.aten`, called without the Python frame of `OpOverload.__call__`."""

OBJECTS = "a collective of Python objects"


def is_functional_collective(target: Operator) -> bool:
    """Return whether a collective returns a new tensor, which must be waited for."""
    return target.namespace != "c10d"


def reduction(boxed: Any) -> str | None:
    """Return the name of a ReduceOp; None for a sum with a factor."""
    name: str = dist.ReduceOp.RedOpType(boxed.op()).name.lower()
    return None if name == "premul_sum" else name


def finished_work(target: Operator, args: Sequence[Any]) -> Any:
    """Return the result of a finished in-place collective: outputs and completed work."""
    from torch._C._distributed_c10d import FakeWork

    returns = len(target._schema.returns)
    if returns == 0:
        return None
    work = FakeWork().boxed()
    return work if returns == 1 else (args[0], work)


def carries_objects() -> bool:
    """Return whether a collective of Python objects is running, which first sends the objects' sizes."""
    here, codes = dist.distributed_c10d.__file__, (frame.f_code for frame in frames(sys._getframe(1)))
    return any(code.co_filename == here and "_object" in code.co_name for code in codes)


def without_hidden_communication(refuse: Callable[[str], Any]) -> AbstractContextManager[None]:
    """Call `refuse` with a description of communication without operators, such as a new process group."""
    hidden = {
        "_object_to_tensor": OBJECTS,
        "_tensor_to_object": OBJECTS,
        "_new_group_with_tag": "a new process group",
    }
    return attributes_instead(
        {dist.distributed_c10d: {name: partial(_refused, refuse, what) for name, what in hidden.items()}}
    )


def _refused(refuse: Callable[[str], Any], what: str, *_: Any, **__: Any) -> Any:
    return refuse(what)
