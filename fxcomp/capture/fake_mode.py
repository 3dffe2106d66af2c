"""Make fake tensors for a step's inputs, in a fake mode that corrects torch's own.

    torch.rand([]) < 0.0         False: no draw is below zero, so Python may branch on it
    torch.rand([]) < 0.1         raises: the result depends on the draw
    torch._grouped_mm of fp32    has a shape: torch's fake accepts bf16 only
    batch_norm of a transpose    is contiguous: torch's fake copies the input's layout
    ones(3).bool().mul_(2)       raises, as eager does: a long result does not fit a bool tensor

Ranges of random values are propagated through monotone operators. A range with equal ends is a constant.
"""

# untyped parts of torch
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef

from fxcomp import compat
from fxcomp.capture.batch_type import distinct, first_places
from fxcomp.capture.questions import Given, Questions
from fxcomp.capture.structures import flatten
from fxcomp.capture.training import Training
from fxcomp.capture.watch import Place
from fxcomp.errors import CaptureFailed
from fxcomp.graph.prelude import Feed

aten = torch.ops.aten

_UNIT = (aten.rand.default, aten.rand.generator, aten.rand_like.default)
_UNIFORM = (aten.uniform_.default, aten.uniform.default)

_MONOTONE = frozenset(
    {
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.add.Scalar, aten.sub.Scalar),
        *(aten.mul.Scalar, aten.div.Scalar, aten.rsub.Scalar, aten.neg.default, aten.clone.default),
        *(aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
        *(aten.floor.default, aten.ceil.default, aten.trunc.default, aten.round.default, aten._to_copy.default),
        *(aten.logical_not.default, aten.bitwise_not.default),
    }
)
"""Monotone operators of one tensor and plain numbers, including comparisons, because False < True."""

_PICKS = frozenset({aten.all.default, aten.any.default, aten.max.default, aten.min.default, aten.amax.default,
                    aten.amin.default})  # fmt: skip
"""Operators that return one of a tensor's values."""


_NORMALISES = {aten.native_batch_norm.default: 0, aten.native_batch_norm_backward.default: 1}
"""Batch norm operators whose fakes have wrong strides on the CPU, with the index of the input argument."""

_DIVIDES_BY_SIZE = frozenset(
    {aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default}
)
"""Operators whose fakes divide by the size in Python and fail for empty tensors."""

_CASTS = {
    aten.add_.Tensor: aten.add.Tensor, aten.add_.Scalar: aten.add.Scalar,
    aten.sub_.Tensor: aten.sub.Tensor, aten.sub_.Scalar: aten.sub.Scalar,
    aten.mul_.Tensor: aten.mul.Tensor, aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor, aten.div_.Scalar: aten.div.Scalar,
    aten.logit_.default: aten.logit.default,
}  # fmt: skip
"""In-place operators whose fakes accept results that cannot be cast to the written tensor, with other operators.

The fakes of the other operators compute the type of the result.
"""

MAKER = "fxcomp_maker"
"""Name of the attribute in which a fake stores its operator."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A number or size that depends on data."""

    maker: OpOverload | None
    """Operator that returned the number; None if read from an input."""
    dtype: torch.dtype
    is_drawn: bool
    is_size: bool


class StepFakes(compat.FakeMode):
    """torch's fake mode with value ranges and corrected fakes."""

    def __init__(self) -> None:
        # The model may have constants outside its buffers.
        super().__init__(shape_env=compat.AskingShapes(self._answer), allow_non_fake_inputs=True)
        self._allow_unsafe_data_ptr_access = False  # a fake has no address: reading it would crash
        self.questions: Questions | None = None
        """None outside of a capture."""
        self._ranges: dict[StorageWeakRef, Tensor] = {}
        self.unknown: dict[str, Unknown] = {}
        """Origins of data-dependent numbers and sizes, by symbol."""

    @property
    def shapes(self) -> ShapeEnv:
        assert self.shape_env is not None, "a step's fakes have symbols"
        return self.shape_env

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._number(func, types, args)
        if func is aten._grouped_mm.default:
            with self:
                return _grouped_product(*args, **given)
        if func is aten._ctc_loss.Tensor:
            with self:
                return _ctc_loss(compat.unknown_size(self.shapes), *args)
        if func is aten._ctc_loss_backward.Tensor:
            with self:
                return torch.empty_like(args[1], memory_format=torch.contiguous_format)
        if func in _DIVIDES_BY_SIZE and any(type(size) is int and size == 0 for size in args[1].shape):
            with self:
                return torch.empty_like(args[1])
        if args and isinstance(args[0], list | tuple) and func._schema.is_mutable:
            _check_each_once(func, args[0])
        if func in _CASTS:
            self._check_type(_CASTS[func], args, given)
        out: Any = super().dispatch(func, types, args, given)
        if func is aten._fused_moving_avg_obs_fq_helper.default:
            with self:
                _resize_ranges(*args)
        if func in _NORMALISES and out[0] is not None:
            out = (_as_batch_norm_lies(out[0], args[_NORMALISES[func]]), *out[1:])
        self._remember(func, args, out)
        if self._ranges or func in _UNIT or func in _UNIFORM:
            self._follow(func, args, given, out)
        return out

    def _answer(self, expression: compat.Expression) -> Any:
        if self.questions is None:
            return None
        with compat.plain_values():
            return self.questions.answer(expression)

    def _check_type(self, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        written = args[0].dtype
        fits = [not isinstance(a, complex) and getattr(a, "dtype", written) is written for a in args[1:]]
        if written.is_floating_point and all(fits):
            return
        with self:
            made = operator(*args, **kwargs).dtype
        if not torch.can_cast(made, written):
            raise RuntimeError(f"result type {made} can't be cast to the desired output type {written}")

    # Ranges

    def _range_of(self, tensor: Any) -> Tensor | None:
        return self._ranges.get(_storage(tensor)) if isinstance(tensor, Tensor) and self._ranges else None

    def _follow(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        ends = _drawn_between(func, args, kwargs, out)
        if ends is None and func in _MONOTONE:
            known = self._range_of(args[0])
            if known is not None and not any(isinstance(other, Tensor) for other in args[1:]):
                with compat.plain_values():
                    ends = func(known, *args[1:], **kwargs)
        if ends is None and func in _PICKS and args[0].numel() > 0:
            ends = self._range_of(args[0])
        if func._schema.is_mutable:
            for argument in func._schema.arguments:
                place = func._schema.arguments.index(argument)
                if argument.alias_info is not None and argument.alias_info.is_write and place < len(args):
                    self._forget(args[place])
        if ends is not None and isinstance(out, Tensor):
            self._ranges[_storage(out)] = ends

    def _forget(self, written: Any) -> None:
        for tensor in written if isinstance(written, list | tuple) else (written,):
            if isinstance(tensor, Tensor):
                self._ranges.pop(_storage(tensor), None)

    def _number(self, func: OpOverload, types: Sequence[type], args: Sequence[Any]) -> Any:
        """Read a scalar tensor. Return a number if the range of the tensor has equal ends, else a symbol."""
        tensor, ends = args[0], self._range_of(args[0])
        low = high = None
        if ends is not None:
            with compat.plain_values():
                low, high = ends.min().item(), ends.max().item()
            if low == high:
                return low
        symbol = super().dispatch(func, types, args, {})
        if isinstance(symbol, torch.SymFloat) and low is not None and high is not None:
            compat.limit(symbol, low, high)
        found = Unknown(getattr(tensor, MAKER, None), tensor.dtype, is_drawn=ends is not None, is_size=False)
        self.unknown |= dict.fromkeys(compat.unbacked_symbols(symbol), found)
        return symbol

    def _remember(self, func: OpOverload, args: Sequence[Any], out: Any) -> None:
        if not isinstance(out, Tensor):
            return
        maker = getattr(args[0], MAKER, func) if args and compat.is_view(func) else func
        setattr(out, MAKER, maker)
        if torch.Tag.dynamic_output_shape in func.tags:
            for size in out.shape:
                for name in compat.unbacked_symbols(size):
                    self.unknown[name] = Unknown(func, out.dtype, is_drawn=False, is_size=True)


def _check_each_once(func: OpOverload, written: Sequence[Any]) -> None:
    if len(set(map(id, written))) < len(written):
        raise CaptureFailed(
            f"the step gives {func} a list in which one tensor is twice, and writes it twice: a compiled step would"
            " write it once.\n  Give each tensor once, or call the operator once for each."
        )


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _drawn_between(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Tensor | None:
    """Return the least and greatest value that an operator may draw; None if unknown."""
    if func in _UNIT:
        low, high = 0.0, 1.0
    elif func in _UNIFORM:
        low, high = (kwargs.get(name, args[place] if len(args) > place else default)
                     for name, place, default in (("from", 1, 0.0), ("to", 2, 1.0)))  # fmt: skip
    else:
        return None
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    with compat.plain_values():
        ends = torch.tensor([low, high], dtype=out.dtype)
        if (low, high) == (0.0, 1.0) and out.dtype in (torch.float32, torch.float64):
            ends[1] -= torch.finfo(out.dtype).eps / 2  # fp32 and fp64 never draw 1.0; coarser types may
    return ends


# Corrected fakes


def _as_batch_norm_lies(fake: Tensor, normalised: Tensor) -> Tensor:
    if fake.device.type != "cpu":
        return fake
    return torch.empty_like(fake, memory_format=compat.suggested_format(normalised))


def _resize_ranges(quantized: Tensor, _observes: Tensor, _quantizes: Tensor, *others: Any) -> None:
    ranges = others[:4]  # minimum, maximum, scale, zero point
    if ranges[0].numel() == 0:
        for buffer in ranges:
            buffer.resize_(quantized.shape[0])


def _ctc_loss(states: Any, log_probs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return fakes of the losses, [batch size], and the saved log alphas, [batch size, steps, states]."""
    steps, rows = log_probs.shape[:2]
    return log_probs.new_empty([rows]), log_probs.new_empty([rows, steps, states])


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the fake of a grouped matrix product; torch's fake supports only unpadded bf16."""
    assert bias is None, "the operator refuses a bias"
    groups = 0 if offs is None else offs.shape[0]
    rows, columns = (a.shape[0] if a.dim() == 2 else a.shape[1]), b.shape[-1]
    dtype = out_dtype or a.dtype
    aligned = 16 // dtype.itemsize  # rows are aligned to 16 bytes
    padded = (columns + aligned - 1) // aligned * aligned
    if a.dim() != b.dim():
        return torch.empty_strided((rows, columns), (padded, 1), dtype=dtype, device=a.device)
    shape = (groups if a.dim() == 2 else a.shape[0], rows, columns)
    return torch.empty_strided(shape, (rows * padded, padded, 1), dtype=dtype, device=a.device)


Varying = Mapping[int, frozenset[int]]
"""Dimensions whose size varies between batches, by index of the batch leaf."""

FIXED_SIZES: Varying = MappingProxyType({})
NO_FLOATS: Mapping[str, Place] = MappingProxyType({})


class StepInputs:
    """Real and fake inputs of one capture, in the traced function's order."""

    def __init__(self, training: Training, batch: Any, varying: Varying, live: Mapping[str, Place] = NO_FLOATS):
        self.mode = StepFakes()
        # A separate mode keeps symbols of hyper-parameters out of the batch's shape guards.
        self.update_mode, self.update_shapes = compat.fake_mode()
        self.parameters = [(name, p, self.of(p)) for name, p in training.model.named_parameters()]
        self.buffers = [(name, b, self.of(b)) for name, b in training.model.named_buffers()]
        leaves, self.batch_spec = flatten(batch)
        self.first_places = first_places(leaves)
        self._model, self._leaves = training.model, leaves
        # A batch tensor that is also a global gets a second fake, because the next batch has another tensor.
        compat.forget_fakes(self.mode, leaves)
        self.batch = [
            compat.fake_with_dynamic_dims(self.mode, leaf, varying.get(i, frozenset()), f"batch_{i}")
            for i, leaf in enumerate(leaves)
        ]
        compat.forget_fakes(self.mode, leaves)
        self.live = live
        """Places of Python floats that are inputs of the graph, by name."""
        self.numbers = [compat.live_number(self.mode.shapes, place.value, name) for name, place in live.items()]
        self._symbols = [compat.symbols_of_number(number) for number in self.numbers]
        self._are_written = False
        scale = training.loss_scale
        self.scale = [] if scale is None else [self.of(scale.scale)]
        self.named: list[tuple[str, Any]] = [
            *((repr(name), tensor) for name, tensor, _ in (*self.parameters, *self.buffers)),
            *((f"batch{path}", leaf) for path, leaf in distinct(batch)),
            *([("the scale of the loss", scale.scale)] if scale is not None else []),
            *((name, None) for name in live),
        ]
        """(name in errors, real tensor) of each input; None instead of a number or a repeated tensor."""

    @contextmanager
    def asked(self) -> Generator[Questions]:
        """Answer Python's questions about values (`questions.py`) inside the context."""
        self.mode.questions = Questions(self._givens())
        try:
            yield self.mode.questions
        finally:
            self.mode.questions = None

    def _givens(self) -> list[Given]:
        batch = [Given(leaf, itemgetter(place)) for place, leaf in enumerate(self._leaves)]
        model = [Given(value, _feed(self._model, name, value)) for name, value, _ in (*self.parameters, *self.buffers)]
        return [*model, *batch, *(Given(fake, None) for fake in self.scale)]

    @property
    def fakes(self) -> tuple[list[Tensor], list[Tensor], list[Any], list[Tensor], list[Any]]:
        parameters, buffers = ([fake for _, _, fake in each] for each in (self.parameters, self.buffers))
        return parameters, buffers, self.batch, self.scale, self.numbers

    @contextmanager
    def in_place(self, traced: Sequence[Any]) -> Generator[None]:
        """Replace Python floats that are graph inputs (`live`) by traced numbers inside the context."""
        before = [(place, place.value) for place in self.live.values()]

        def note() -> None:
            self._are_written = True

        try:
            for (place, _), number in zip(before, traced, strict=True):
                place.write(number)
            with compat.noting_texts(note) if before else nullcontext():
                yield
        finally:
            for place, value in before:
                place.write(value)

    @property
    def decided(self) -> list[str]:
        """Names of the floats in `live` that decided a branch, or that Python read as a plain number or text."""
        decided = compat.decided_symbols(self.mode.shapes)
        pairs = zip(self.live, self._symbols, strict=True)
        return [name for name, symbols in pairs if self._are_written or decided & symbols]

    @property
    def symbols(self) -> set[str]:
        """Names of the symbols in the batch's sizes."""
        return compat.symbols(self.batch)

    def named_pairs(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        entries = zip((*self.parameters, *self.buffers), (*parameters, *buffers), strict=True)
        return {name: (real, traced) for (name, real, _), traced in entries}

    def whole_batch(self, traced: Sequence[Any]) -> Any:
        """Build the batch from traced leaves; repeated tensors stay one object."""
        return pytree.tree_unflatten([traced[place] for place in self.first_places], self.batch_spec)

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's fake for the forward and backward pass."""
        return self.mode.from_tensor(tensor, static_shapes=True)

    def of_update(self, tensor: Tensor) -> Tensor:
        """Return a tensor's fake for the optimizer's update."""
        return self.update_mode.from_tensor(tensor.detach(), static_shapes=True)


def _feed(model: nn.Module, name: str, value: Tensor) -> Feed | None:
    """Return a function that reads a buffer or frozen parameter; None for trained parameters."""
    if value.requires_grad:
        return None
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    return lambda _: getattr(module, attribute)
