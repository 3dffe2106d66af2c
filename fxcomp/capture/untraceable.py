"""Say why a step does not trace: the user's line, the value that Python looked at, and a way out."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

import torch

from fxcomp import compat
from fxcomp.capture.fake_mode import StepFakes, Unknown
from fxcomp.errors import CaptureFailed, FxcompError


@contextmanager
def explaining(fakes: StepFakes) -> Generator[None]:
    """Turn torch's errors of tracing on these fakes into errors that say what to do."""
    try:
        yield
    except FxcompError:
        raise
    except Exception as error:
        if fakes.questions and compat.is_raised_by_user(error):
            raise  # what Python asked about the batch made it raise, as it does in eager PyTorch
        line = compat.users_source(error)
        at = f"  {line}\n" if line else ""
        looked_at = _looked_at(error, fakes)
        if looked_at is not None or isinstance(error, compat.DATA_DEPENDENT):
            raise CaptureFailed(_data_decides(at, looked_at, error)) from error
        if "mutating a non-functional tensor" in str(error):
            raise CaptureFailed(
                "the step writes into views of a tensor that does not belong to the model, which one graph cannot"
                f" follow.\n{at}  Register that tensor as a buffer of the model, or make it a plain one that requires"
                " no gradient."
            ) from error
        if "metadata mutating ops on non-Fake" in str(error):
            raise CaptureFailed(
                "the step changes the shape of a tensor that does not belong to the model, which a compiled step would"
                f" not do again.\n{at}  Work with a view or a copy of it, as .t() and .unsqueeze() make them."
            ) from error
        raise CaptureFailed(
            f"the training step does not trace into one graph: {type(error).__name__}: {_first_line(error)}\n{at}"
            "  The error above this one has the rest of the way there. Reentrant activation checkpointing, custom C++"
            " autograd, libraries that compute otherwise while traced, and Python that reads tensors' memory do"
            " not trace."
        ) from error


def _looked_at(error: Exception, fakes: StepFakes) -> Unknown | None:
    """Find the meaning of the symbol that an error complains about; torch names it in the text alone."""
    names = re.findall(r"\b(?:u|zuf)\d+\b", str(error))
    return next((fakes.unknown[name] for name in names if name in fakes.unknown), None)


def _data_decides(at: str, looked_at: Unknown | None, error: Exception) -> str:
    if looked_at is None:
        return (
            f"the step decides by the values of tensors, which one graph cannot.\n{at}  {_first_line(error)}\n"
            "  Move the decision out of loss_fn, or compute both sides and select with torch.where."
        )
    made_by = f" that {looked_at.maker} gives" if looked_at.maker is not None else ""
    if looked_at.is_size:
        return (
            "the step decides by the size of a tensor that the values of another tell, which one graph cannot.\n"
            f"{at}  Python looked at the size of what {looked_at.maker} gives.\n"
            "  Keep the size fixed: mask with torch.where or a product instead of picking elements, or pick them"
            " outside and pass them in the batch."
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
        "  Move the decision out of loss_fn: pass what is decided in the batch, as a plain value, which is captured"
        " for each of its values. Or compute both sides and select with torch.where."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
