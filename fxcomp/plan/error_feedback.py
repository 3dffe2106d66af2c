"""Describe error feedback, which adds what compression leaves out of a gradient to the next one.

    p = g + e            what a rank compresses: its gradient and its residual
    e <- p - C(p)        what the payload C(p) does not stand for

A residual is in the gradient's unit, one fp32 value an element and rank, and the optimizer runs after the mean of the
payloads. Over all steps, payloads and the last residual add up to the gradients (Stich et al. 2018, Karimireddy et al.
2019). With momentum correction a rank compresses its own momentum instead of its gradient (Lin et al. 2018):

    u <- m u + g         the velocity of its own gradients
    p = u + e
    u <- 0               where a value was sent as it is: momentum does not go on from before what is new by then
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fxcomp.compressors import Compressor
from fxcomp.compressors.facts import Feedback
from fxcomp.errors import BadOption


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback:
    """The variant of error feedback. The defaults are classic error feedback where it is needed.

    `scale_with_lr`: compress g + (lr_before / lr_now) e, so that a residual weighs in the update what it would have
    weighed when it was left out (Zheng et al. 2019). It matters where the learning rate drops in steps: without it,
    what a large rate left out is applied at the small one. A rate of zero is passed over. A step whose rate did not
    change does nothing more; otherwise residuals are read and written once.

    `momentum`: each rank keeps the momentum of its own gradients before compression, in the place of the optimizer's,
    which must have none (Lin et al. 2018). What waits in a residual then gathers momentum as it would have if it had
    been sent at once. Where compressors send values as they are, such as topk, the velocity of what was sent starts
    again. In all other buckets, dense ones too, the mean of the ranks' velocities is the velocity of the mean: a dense
    plan trains as with the optimizer's momentum. One more fp32 value an element and rank, in the optimizer's stead.
    The optimizer's weight decay stays after it, outside of the velocity: what `SGD(momentum=m, weight_decay=w)`
    does needs about w / (1 - m) here.

    `everywhere`: also around compressors that can do without, such as bf16 and int8: what a rank rounds away is not
    lost, for one more pass. Sums on the wire still round.

    `off`: no feedback. `allow_diverging`: run what is refused otherwise. Both are for experiments, with a given plan.
    """

    scale_with_lr: bool = False
    momentum: float = 0.0
    everywhere: bool = False
    off: bool = False
    allow_diverging: bool = False

    def __post_init__(self) -> None:
        given: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("scale_with_lr", "everywhere", "off", "allow_diverging"):
            if not isinstance(given[name], bool):
                raise BadOption(f"ErrorFeedback.{name} is True or False; it is {given[name]!r}")
        momentum = given["momentum"]
        if not isinstance(momentum, int | float) or isinstance(momentum, bool) or not 0 <= momentum < 1:
            raise BadOption(f"ErrorFeedback.momentum is from 0 (none) to below 1; it is {momentum!r}")
        if self.off and (self.everywhere or self.scale_with_lr or self.momentum):
            raise BadOption(
                "ErrorFeedback(off=True) has nothing to scale, to correct or to put everywhere.\n"
                "  Leave off=True out, or the other options."
            )

    def surrounds(self, compressor: Compressor) -> bool:
        """Return whether a compressor gets a residual."""
        match compressor.feedback:
            case Feedback.REQUIRED:
                return not self.off
            case Feedback.OPTIONAL:
                return self.everywhere
            case Feedback.FORBIDDEN:
                return self.everywhere and self.allow_diverging


CLASSIC = ErrorFeedback()
"""Around compressors that need it, from the first step on."""
