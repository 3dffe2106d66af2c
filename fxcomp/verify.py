"""Compare a compiled step with eager PyTorch while it runs, and raise on every rank where they differ."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.capture import Captured
from fxcomp.errors import VerificationFailed
from fxcomp.runtime.runtime import Runtime
from fxcomp.training import Training

GRADIENT_TOLERANCE = 1e-4
"""Relative to the largest element. Eager regions repeat eager's own operators; 1e-4 is fp32 noise of reordered sums."""


class Verifier:
    """Runs eager PyTorch beside some of the steps."""

    def __init__(self, training: Training, every: int):
        self._training = training
        self._every = every
        self._parameters = dict(training.model.named_parameters())

    def wants(self, step: int) -> bool:
        """Whether a step is verified; every rank says the same."""
        return self._every > 0 and step % self._every == 0

    @contextmanager
    def checked(self, batch: Any, captured: Captured, runtime: Runtime, step: int) -> Generator[None]:
        """Compare loss and gradients with eager PyTorch before anything is updated."""
        loss, expected = self._eager(batch, captured)
        wrong: list[str] = []

        def on_gradient(name: str, gradient: Tensor) -> None:
            if not wrong and not _close(gradient, expected[name]):
                difference = (gradient - expected[name]).abs().max().item()
                largest = expected[name].abs().max().item()
                wrong.append(
                    f"the gradient of {name!r} differs from eager by up to {difference:.3g}, where it reaches"
                    f" {largest:.3g}"
                )

        def on_update(value: Tensor) -> None:
            if not _close(value, loss):
                wrong.insert(0, f"the loss is {value.item():.9g}, eager's is {loss.item():.9g}")
            self._agree(wrong, runtime, step)

        runtime.on_gradient, runtime.on_update = on_gradient, on_update
        try:
            yield
        finally:
            runtime.on_gradient = runtime.on_update = None

    def _eager(self, batch: Any, captured: Captured) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and local gradients as eager PyTorch computes them; buffers and random numbers as if it had not."""
        model = self._training.model
        saved = [(module._buffers, dict(module._buffers)) for module in model.modules()]  # pyright: ignore[reportPrivateUsage]
        values = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        names = captured.gradient_names
        devices: set[int | None] = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
        cuda = sorted(d for d in devices if d is not None)
        with torch.random.fork_rng(cuda), torch.enable_grad():  # pyright: ignore[reportUnknownMemberType]  # untyped
            result = self._training.loss_fn(model, batch)
            loss = result[0] if captured.has_aux else result
            with compat.without_autocast():
                wanted = [self._parameters[name] for name in names]
                gradients: Any = torch.autograd.grad(loss, wanted, allow_unused=True)
        with torch.no_grad():
            for table, original in saved:
                table.update(original)  # the forward pass may have put new ones in their places
            for buffer in model.buffers():
                buffer.copy_(values[id(buffer)])
        zero = {
            name: torch.zeros_like(self._parameters[name])
            for name, g in zip(names, gradients, strict=True)
            if g is None
        }
        return loss.detach(), {n: g for n, g in zip(names, gradients, strict=True) if g is not None} | zero

    def _agree(self, wrong: Sequence[str], runtime: Runtime, step: int) -> None:
        """Raise on every rank if any found a difference: one that went on alone would wait for the others for ever."""
        flag = torch.tensor([float(bool(wrong))], device=self._training.device)
        runtime.transport.all_reduce(flag, "world", "main").wait()
        bad = bool(flag.item())
        if bad:
            what = wrong[0] if wrong else "another rank found a difference"
            raise VerificationFailed(
                f"step {step}: {what}.\n"
                "  No parameter has been updated; buffers and residuals may have. The capture is wrong for this model:"
                " please report it with the model's code, and train with eager PyTorch meanwhile."
            )


def _close(value: Tensor, expected: Tensor) -> bool:
    """Equal up to fp32 noise; what is not finite must be so in both."""
    if value.shape != expected.shape:
        return False
    both = torch.isfinite(value) & torch.isfinite(expected)
    if not bool((torch.isfinite(value) == torch.isfinite(expected)).all()):
        return False
    scale = expected[both].abs().max().item() if bool(both.any()) else 0.0
    if not bool(both.any()):
        return True
    return bool(((value - expected)[both].abs().max() <= GRADIENT_TOLERANCE * scale + 1e-12).item())
