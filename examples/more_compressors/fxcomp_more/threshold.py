"""Send the values whose magnitude reaches a threshold that the user chose.

    decoded = v where |v| >= value, 0 elsewhere

Payload: fxcomp/compressors/survivors.py; its slots follow from `ratio`, the largest share that may be sent.

Where no more values reach the threshold than there are slots, nothing left out is as large as `value`: with error
feedback no residual is, however small gradients become, and what is sent shrinks with them. Where more values reach it,
the largest are sent and the others wait, and there is no such bound. If each step brings more over the threshold than
there are slots, residuals grow until `ratio` alone decides, as with top-k: with standard Gaussian gradients, value 0.5
and ratio 0.01, 88 % of the values wait above the threshold after 200 steps, and the largest is 8.2.

Estimating costs nothing. What fits depends on the gradients' scale, which the user must know: about 1 / (2 sqrt(k))
times the scale for k values a step. The relative error has no bound: nothing is sent where all magnitudes are below the
threshold, until they have added up. For Gaussian values of unit variance it is 0.74 at value 2 (4.6 % sent) and 0.97 at
value 3 (0.27 % sent).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors import (
    Bias,
    Compressed,
    Compressor,
    DecoderInput,
    EncoderInput,
    Facts,
    Feedback,
    Parameter,
    register,
    survivors,
)


@register
@dataclass(frozen=True, slots=True)
class Threshold(Compressor):
    """Sends only what matters, in a fixed number of slots."""

    value: float
    ratio: float

    facts: ClassVar[Facts] = Facts(
        name="threshold",
        summary="the values from a given magnitude on",
        payload="4 + 4c + P(n, c), c = ⌈1.3⌈ratio·n⌉⌉, P as for topk",
        is_joined=True,
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        parameters=(
            Parameter("value", "smallest magnitude sent", 1e-30, 1e30),
            Parameter("ratio", "share of values for which the payload has room, and 30 % more", 1e-6, 1.0),
        ),
        use="Where the gradients' scale is known: while the slots suffice, nothing of `value` or more is left out.",
        avoid="Where the scale is unknown or differs between layers: sidco finds the threshold. Where more values reach"
        " it than fit, the rest waits, without a bound.",
        source="Aji and Heafield 2017; Sahu et al. 2021, rethinking sparsification",
    )

    @property
    def bits(self) -> int:
        return int(survivors.magnitude_bits(torch.tensor(self.value, dtype=torch.float32)))

    def payload_elements(self, segments: Sequence[int]) -> int:
        return survivors.payload_bytes(segments, self.ratio)

    def compress_reference(self, given: EncoderInput) -> Compressed:
        return survivors.compress(given, self.ratio, [self.bits] * len(given.segments))[0]

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        return survivors.decompress(received, self.ratio)
