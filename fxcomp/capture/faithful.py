"""Run a forward pass on traced tensors as eager PyTorch would; raise CaptureFailed for operations that tracing changes.

Errors name the user's line, the value that Python read, and a remedy. One documented difference remains: the gradient
of `nn.Embedding(sparse=True)` is dense, because a bucket holds dense tensors.
"""

# torch's overrides are untyped; accessors of sparse entries are private.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fxcomp import compat
from fxcomp.capture.fake_mode import StepFakes, Unknown
from fxcomp.capture.pythons_numbers import NumberReader, pythons_numbers
from fxcomp.capture.stand_ins import EqualToReal, StandIns
from fxcomp.errors import CaptureFailed, FxcompError

_READ_MEMORY = (
    *("argument of type: <class 'torch.storage", "its data is not allocated yet", "Cannot access data pointer"),
    *("Not available for 'meta' device", "only available on CPU"),
)
"""Fragments of torch's errors about a fake tensor's memory."""


@contextmanager
def explaining(fakes: StepFakes) -> Generator[None]:
    """Replace torch's tracing errors by errors with a remedy."""
    try:
        yield
    except FxcompError:
        raise
    except Exception as error:
        line = compat.users_source(error)
        at = f"  {line}\n" if line else ""
        looked_at = _looked_at(error, fakes)
        if looked_at is not None or isinstance(error, compat.DATA_DEPENDENT):
            raise CaptureFailed(_data_decides(at, looked_at, error)) from error
        if "mutating a non-functional tensor" in str(error):
            raise CaptureFailed(
                "the step writes into views of a tensor that does not belong to the model, which one graph cannot"
                f" follow.\n{at}  Register that tensor as a buffer of the model, or make it a plain tensor that"
                " requires no gradient."
            ) from error
        if "metadata mutating ops on non-Fake" in str(error):
            raise CaptureFailed(
                "the step changes the shape of a tensor that does not belong to the model, which a compiled step would"
                f" not do again.\n{at}  Work with a view or a copy of it, as .t() and .unsqueeze() make them."
            ) from error
        if _is_packed(error):
            raise CaptureFailed(
                "a recurrent layer is given a PackedSequence, whose sizes are data, which one graph cannot follow.\n"
                f"{at}  Give it the padded batch and its lengths, and pick the end of each sequence by its length"
                " (out[torch.arange(len(lengths)), lengths - 1]). Or keep DistributedDataParallel and use"
                " fxcomp.ddp_hook, which takes packed sequences."
            ) from error
        if any(text in str(error) for text in _READ_MEMORY):
            raise CaptureFailed(_reads_memory(at)) from error
        if compat.is_raised_as_eager(error):
            error.add_note(
                f"fxcomp: loss_fn raised this while it was traced.\n{at}"
                "  If loss_fn(model, batch) raises it too, the mistake is in that line. If not, its inputs differ"
                " while tracing: tensors have no values then, and some numbers are symbols."
            )
            raise
        raise CaptureFailed(
            f"the training step does not trace into one graph: {type(error).__name__}: {_first_line(error)}\n{at}"
            "  The error above this one has the full traceback. Custom C++ autograd, libraries that behave"
            " differently while traced, and Python that reads tensors' memory do not trace."
        ) from error


def _is_packed(error: Exception) -> bool:
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_filename == nn.modules.rnn.__file__]
    return any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values())


def _looked_at(error: Exception, fakes: StepFakes) -> Unknown | None:
    """Return the origin of the data-dependent symbol in an error's message, if any."""
    names = re.findall(r"\b(?:u|zuf)\d+\b", str(error))
    return next((fakes.unknown[name] for name in names if name in fakes.unknown), None)


def _data_decides(at: str, looked_at: Unknown | None, error: Exception) -> str:
    if looked_at is None and isinstance(error, compat.SIZE_DEPENDS):
        return (
            f"the sizes of the output of {_first_line(error)} depend on values, which one graph cannot follow.\n{at}"
            "  Compute it another way, as linalg.pinv(a) @ b for linalg.lstsq(a, b).solution, or outside of loss_fn."
        )
    if looked_at is None:
        return (
            f"the step decides by the values of tensors, which one graph cannot.\n{at}  {_first_line(error)}\n"
            "  Move the decision out of loss_fn, or compute both sides and select with torch.where."
        )
    made_by = f" that {looked_at.maker} gives" if looked_at.maker is not None else ""
    if looked_at.is_size:
        return (
            "the step decides by a size that depends on the values of a tensor, which one graph cannot.\n"
            f"{at}  Python looked at the size of the output of {looked_at.maker}.\n"
            "  Keep the size fixed: mask with torch.where or a product instead of picking elements, or pick them"
            " outside and pass them in the batch."
        )
    if looked_at.maker is torch.ops.aten._is_all_true.default:
        return (
            "the step decides by the values of tensors, which one graph cannot: torch.distributions checks parameters"
            f" or values that the model computes.\n{at}"
            "  Make the distribution with validate_args=False, as in Normal(mean, scale, validate_args=False)."
        )
    kind = "truth" if looked_at.dtype is torch.bool else "number"
    if looked_at.is_drawn:
        return (
            f"the step decides by the values of tensors, which one graph cannot: here by a draw.\n{at}"
            f"  Python looked at the {kind}{made_by}.\n"
            "  Set the probability to 0 (layer drop), or compute both sides and select with torch.where, which draws in"
            " the graph."
        )
    return (
        f"the step decides by the values of tensors, which one graph cannot.\n{at}"
        f"  Python looked at the {kind}{made_by}.\n"
        "  Move the decision out of loss_fn: pass the decision in the batch, as a plain value, which is captured"
        " for each of its values. Or compute both sides and select with torch.where. To log a number, return the tensor"
        " with the loss, and read it outside."
    )


def _reads_memory(at: str) -> str:
    return (
        "the step reads, copies or hands out a tensor's memory past torch's operators, which one graph cannot follow:"
        " by its address, its storage, DLPack, copy.deepcopy, pickle, shared memory, or torch.tensor of other tensors."
        f"\n{at}  Copy with .clone(), put tensors together with torch.stack, or do it outside of loss_fn."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


_DATA: Any = inspect.getattr_static(Tensor, "data")

_ASIDE: Mapping[str, Any] = {name: inspect.getattr_static(Tensor, name) for name in ("grad", "_version")}
"""Tensor attributes that eager steps change without an operator."""


@contextmanager
def faithful(stand_ins: StandIns, fakes: StepFakes, *, caches_casts: bool) -> Generator[_Refusing]:
    """Give a traced forward and backward pass the results of eager PyTorch, or raise.

    Yields a recorder of gradient hooks and of weights whose gradient is sparse in eager PyTorch.

    `caches_casts` turns on autocast's cache, which tracing turns off. With the cache, a weight used twice is cast once,
    and its gradient is summed in the lower precision.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(caches_casts)
    torch.clear_autocast_cache()
    try:
        with (
            pythons_numbers(fakes) as reader,
            _Refusing(stand_ins, reader) as refusing,
            compat.function_mode_in_backward(refusing),
            _methods_refused(),
        ):
            yield refusing
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _methods_refused() -> Generator[None]:
    """Raise for storage methods that crash or do nothing on a fake, and for GradScaler.scale in loss_fn."""

    def refusing(name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(torch.UntypedStorage, name)

        def run(storage: torch.UntypedStorage, *args: Any) -> Any:
            if storage.device.type == "meta" and compat.is_called_by_user():
                raise CaptureFailed(_reads_memory(_at()))
            return method(storage, *args)

        return run

    def scaled(scaler: compat.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise CaptureFailed(
                "the loss function scales the loss by a GradScaler, and a compiled step would update by gradients that"
                f" are never unscaled.\n{_at()}  Return the loss as it is, and give compile_step the scaler:"
                " scaler=scaler. Leave unscale_ and step out of the loop; scaler.update() stays."
            )
        return outputs

    storage = {name: refusing(name) for name in ("resize_", "_write_file")}
    with compat.attributes_instead({torch.UntypedStorage: storage, compat.GradScaler: {"scale": scaled}}):
        yield


_VALUES = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.apply_, Tensor.map_, Tensor.map2_)
"""Methods that read a tensor's memory without an operator."""


_ENTRIES = (Tensor._nnz, Tensor.values, Tensor.indices, Tensor._values, Tensor._indices)
"""Accessors of a sparse tensor's entries. The number of entries depends on data."""

_CASTS_INSIDE = (torch.bilinear, torch.nn.functional.bilinear)
"""Composite operators whose inner operators are cast by autocast."""


_LOOKS_UP = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)


_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)

_READS = (Tensor.item, Tensor.tolist)

_WRITES_TEXT = (Tensor.__repr__, Tensor.__format__)

_COMPARES_ROUGHLY = (torch.allclose, Tensor.allclose)
"""Functions that read values and have no fake implementation."""


_QUANTILES = (torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile)
"""Functions that check their second argument, except on fake tensors."""


_TAKES_NUMBERS = (torch.nn.functional.interpolate, torch.nn.functional.pad)
"""Functions that accept scalar tensors as sizes or factors."""


class _Refusing(EqualToReal):
    """Function mode that raises for calls without an operator, such as `.numpy()`, and corrects a few others."""

    def __init__(self, stand_ins: StandIns, reader: NumberReader):
        super().__init__(stand_ins)
        self._reader = reader
        self.densified: list[str] = []
        self.has_hooks = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is _DATA and getattr(func, "__name__", "") == "__set__":
            return self._assign(*args)
        if aside := next((name for name, table in _ASIDE.items() if getattr(func, "__self__", None) is table), None):
            self._check_is_in_graph(aside, *args, reads=func.__name__ == "__get__")
        self.has_hooks |= func in _HOOKS
        if func in _VALUES:
            raise CaptureFailed(
                f"the step reads a tensor's values with .{func.__name__}(), which one graph cannot.\n{_at()}"
                "  Compute with torch instead, or pass the number in the batch, as a plain value."
            )
        if func is Tensor.__reduce_ex__:
            raise CaptureFailed(_reads_memory(_at()))
        if func in _ENTRIES and args[0].is_sparse:
            raise CaptureFailed(
                f"the step looks at the entries of a sparse tensor with .{func.__name__}(), whose number is data, which"
                f" one graph cannot.\n{_at()}"
                "  Pass clones of indices and values in the batch, as tensors; products with it and .to_dense() are"
                " captured."
            )
        if func in _CASTS_INSIDE and torch.is_autocast_enabled(args[0].device.type):
            raise CaptureFailed(
                f"{func.__name__} runs under autocast, which reaches into it: a captured step would compute in another"
                f" precision.\n{_at()}"
                "  Run it outside: with torch.autocast(..., enabled=False), on inputs in float32."
            )
        if func in (*_READS, *_WRITES_TEXT) and compat.is_traced_here():
            _check_is_traced(args[0])
            if func in _WRITES_TEXT:
                return self._text(func, *args)
        if func in _READS:
            return self._reader.read(func.__name__, args[0])
        if func in _COMPARES_ROUGHLY:
            return bool(torch.isclose(*args, **(kwargs or {})).all())
        if func in _TAKES_NUMBERS and args:
            numbers, named = pytree.tree_map_only(Tensor, int, (tuple(args[1:]), kwargs or {}))
            return func(args[0], *numbers, **named)
        if func is torch.nn.functional.one_hot:
            return _one_hot(func, *args, **(kwargs or {}))
        if func in _QUANTILES and isinstance(q := [*args[1:2], (kwargs or {}).get("q")][0], Tensor):
            torch.ops.aten._assert_async.msg(
                ((q >= 0) & (q <= 1)).all(), "quantile() q values must be in the range [0, 1]"
            )
        if func is torch.arange:
            args, kwargs = pytree.tree_map_only(
                (Tensor, torch.SymFloat), self._reader.number, (tuple(args), kwargs or {})
            )
        if func in _LOOKS_UP and kwargs and kwargs.get("sparse"):
            name = self._stand_ins.name(args[1])
            self.densified += [name] if name and name not in self.densified else []
            kwargs = {**kwargs, "sparse": False}
        return super().__torch_function__(func, types, args, kwargs)

    def _assign(self, tensor: Tensor, value: Tensor) -> None:
        """For `tensor.data = value`, copy the value into the buffer or frozen parameter; otherwise raise."""
        name = self._stand_ins.name(tensor)
        alike = tensor.shape == value.shape and tensor.dtype is value.dtype and tensor.device == value.device
        is_known = any(compat.is_alias(value, each) for each in self._stand_ins.by_id.values())
        if name and alike and not is_known and not tensor.requires_grad:
            with torch.no_grad():
                tensor.copy_(value)
            return
        raise CaptureFailed(
            f"the forward pass assigns to `.data` of {repr(name) if name else 'a tensor'}, which leaves no trace in a"
            f" captured step.\n{_at()}  Write in place instead: with torch.no_grad(): tensor.copy_(value). Or assign"
            " outside of loss_fn, after the step."
        )

    def _check_is_in_graph(self, what: str, tensor: Tensor, value: Any = None, *, reads: bool) -> None:
        name = self._stand_ins.name(tensor)
        if name and isinstance(value, Tensor) and compat.is_called_by_user():
            raise puts_gradient(name, _at())
        if reads and name and compat.is_called_by_user():
            raise CaptureFailed(
                f"the step reads .{what} of {name!r}, which a compiled step does not have.\n{_at()}"
                "  Take gradients with torch.autograd.grad, and count in a buffer."
            )

    def _text(self, func: Callable[..., Any], tensor: Tensor, *form: str) -> str:
        if (known := self._reader.known(tensor)) is not None:
            with compat.plain_values():
                shown = nn.Parameter(known, requires_grad=False) if isinstance(tensor, nn.Parameter) else known
                return func(shown, *form)
        if not compat.is_called_by_user():  # in a library's error or warning
            return f"tensor(shape={list(tensor.shape)}, dtype={tensor.dtype})"
        if func is Tensor.__format__ and tensor.dim() == 0:
            return format(self._reader.number(tensor), *form)
        raise CaptureFailed(
            f"the step makes a text of a tensor's values, which a graph does not have.\n{_at()}"
            "  Print it outside of loss_fn: return the tensor with the loss. The text of a number read from the batch"
            " (.item()) is captured."
        )


def puts_gradient(name: str, at: str = "") -> CaptureFailed:
    """Return the error for a step that writes a parameter's `.grad`."""
    return CaptureFailed(
        f"the step puts a gradient into .grad of {name!r}, to which a compiled step adds nothing.\n{at}"
        "  Return the sum of all losses instead of calling backward() on one, or take gradients with"
        " torch.autograd.grad. An autograd.Function calls backward() in its own backward, or returns the gradient. A"
        " hook that calls backward() is registered on the tensor, tensor.register_hook, instead of on its grad_fn."
    )


def _one_hot(func: Callable[..., Tensor], rows: Tensor, num_classes: int = -1) -> Tensor:
    """Return one-hot rows with eager's range check, which torch's fake lacks."""
    classes = func(rows, num_classes).shape[-1]
    return rows.new_zeros((*rows.shape, classes)).scatter_(-1, rows.unsqueeze(-1), 1)


def _check_is_traced(tensor: Tensor) -> None:
    if not compat.is_fake(compat.traced(tensor)):
        raise CaptureFailed(
            f"the step reads the values of a {type(tensor).__name__} from outside the model, which one graph cannot"
            f" follow.\n{_at()}  Read them from a plain tensor: .as_subclass(torch.Tensor), made outside of loss_fn."
        )


def _at() -> str:
    line = compat.users_line()
    return f"  {line}\n" if line else ""
