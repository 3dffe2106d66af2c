"""What a compressor declares about itself, as data: reports, checks and docs/compressors.md are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Feedback(Enum):
    """Whether what compression leaves out must be carried to the next step."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    FORBIDDEN = "forbidden"
    """It diverges: the compressor is unbiased and its error can exceed what it is given."""


class Bias(Enum):
    """What the mean of many compressions of one vector is."""

    UNBIASED = "unbiased"
    ROUNDING = "rounding"
    """Off by less than a rounding step, in no direction."""
    BIASED = "biased"


class Case(Enum):
    """Why fxcomp has a compressor: docs/decisions/0012-fewer-compressors.md."""

    MODE = "mode"
    """A mode offers it."""
    SYSTEM = "system"
    """A published system that we build on needs it."""
    CHOICE = "choice"
    """A user would pick it over every other for some job, which `Facts.use` names."""


class Agreement(Enum):
    """How the ranks' proposals become one, before they compress."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a compressor and the range that it may have."""

    name: str
    meaning: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.name}: {self.meaning}, {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a compressor declares. Formulas are text for people; n is a segment's size, ⌈ ⌉ rounds up."""

    name: str
    summary: str
    """One line."""
    payload: str
    """Bytes for n values, as a formula; `payload_bytes` computes it."""
    payload_dtype: torch.dtype = torch.uint8
    is_linear: bool = False
    """Payloads can be summed on the wire (all_reduce); otherwise they are gathered and decoded together."""
    bias: Bias
    feedback: Feedback
    passes: int = 1
    """How often encoding reads the whole gradient from main memory."""
    parameters: tuple[Parameter, ...] = ()
    """The fields that the text form has. A plan carries nothing else of a compressor."""
    filled_in: tuple[str, ...] = ()
    """The fields that `bound_to` computes from the parameters' shapes and the number of ranks, the same everywhere."""
    state: str = "none"
    """Bytes kept from step to step besides the residual, as a formula; `state_elements` computes it."""
    state_dtype: torch.dtype = torch.float32
    decode_needs_state: bool = False
    """Decoding is given the state that this step's encoding returned (random-k draws its places again)."""
    state_from_payload: bool = False
    """The payload summed over the ranks is the next step's state (PowerSGD's warm start)."""
    agreement: Agreement | None = None
    """Ranks first reduce what `propose` makes, and compress knowing the result."""
    proposal: str = "none"
    """Bytes of the proposal, as a formula."""
    proposal_dtype: torch.dtype = torch.float32
    sends_values: bool = False
    """What it sends it sends exactly: the residual is 0 where a value was sent, and the whole value elsewhere."""
    needs_whole_parameters: bool = False
    """Cannot compress a shard of a bucket: it uses the parameters' shapes."""
    use: str
    """When to use it."""
    avoid: str
    """When not."""
    source: str
    """Where the method is from."""
    case: Case = Case.CHOICE
