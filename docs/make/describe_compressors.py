"""Write docs/compressors.md from what the compressors declare.

    python docs/make/describe_compressors.py > docs/compressors.md

Sizes are computed and errors are measured on seeded samples while the page is made; all else comes from `facts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from textwrap import fill
from typing import Any, cast

import torch

from fxcomp.compressors import Bias, Compressor, Feedback, Parameter
from fxcomp.compressors.examples import bits_per_value, examples
from fxcomp.testing.rounds import average, replicas_of
from fxcomp.testing.samples import gaussian, laplace

SIZE = 2**20
SHAPE = (1024, 1024)
SAMPLE = 2**17
SAMPLE_SHAPE = (512, 256)
WIDTH = 120

_BIAS = {Bias.UNBIASED: "unbiased", Bias.ROUNDING: "rounding", Bias.BIASED: "biased"}
_FEEDBACK = {
    Feedback.REQUIRED: "Needs error feedback.",
    Feedback.OPTIONAL: "Error feedback is optional.",
    Feedback.FORBIDDEN: "Refuses error feedback: it would diverge.",
}

HEAD = f"""\
# Compressors

Made by `python docs/make/describe_compressors.py` from what each compressor declares: edit `facts`, not this page.

The first column is a compressor's text in plans and strategies. In formulas n is the number of values of one parameter,
B a block's size, and ⌈ ⌉ rounds up. [Strategies](strategies.md#strategies-of-each-mode) says which mode offers what;
[more compressors](../examples/more_compressors) are a package of their own.

- *Bits* count all that a rank sends for a matrix of {SHAPE[0]} × {SHAPE[1]}, agreement included.
- The network adds *linear* payloads up (all_reduce). All ranks gather the others.
- *Passes* is how often encoding reads the gradient from main memory.
- *State* is kept for a parameter from step to step, besides the residual.
- *ω* = |v − decoded|² / |v|² is the error of one compression of {SAMPLE:,} values, on one rank, without error feedback.
  Error feedback delays it to the next step. An unbiased compressor's errors differ between ranks and average out: the
  mean over N ranks has ω/N.

Compressors take and give fp32. Gradients of another type become fp32 while they are packed, or after a sum inside their
host. Their residuals are fp32. The mean is rounded to the gradients' type once, alike on all ranks. Dense gradients
travel in their own type. So bf16 gains nothing for gradients in 16 bits, and no mode offers it for them. int8 halves
their bytes; of fp32's it leaves a quarter.

"""


def describe() -> str:
    """The whole page."""
    compressors = examples()
    own: dict[str, list[Compressor]] = {}
    for compressor in compressors:
        own.setdefault(compressor.name, []).append(compressor)
    paragraphs = [_paragraph(kinds[0]) for kinds in own.values()]
    return HEAD + _table(compressors) + "\n" + "\n".join(paragraphs)


def relative_error(compressor: Compressor, values: torch.Tensor, shape: Sequence[int]) -> float:
    """ω: the share of the squared norm that one compression loses, for one rank."""
    bound, segments = compressor.bound_to([shape], 1), (len(values),)
    replicas = replicas_of(bound, segments, feedback=False)
    lost = values - average(bound, [values], replicas, segments, [shape])
    return (lost.double().square().sum() / values.double().square().sum()).item()


def _table(compressors: Sequence[Compressor]) -> str:
    heads = (
        "compressor",
        "payload bytes",
        "bits a value",
        "linear",
        "bias",
        "feedback",
        "passes",
        "state bytes",
    )
    lines = ["| " + " | ".join((*heads, "ω Gaussian", "ω Laplace")) + " |", "|---" * (len(heads) + 2) + "|"]
    normal, double_exponential = gaussian(SAMPLE), laplace(SAMPLE)
    for compressor in compressors:
        facts = compressor.facts
        cells = (
            f"[`{compressor}`](#{compressor.name})",
            facts.payload,
            f"{bits_per_value(compressor, SHAPE):.3g}",
            "yes" if facts.is_linear else "no",
            _BIAS[compressor.bias],
            compressor.feedback.value,
            str(facts.passes),
            facts.state if compressor.has_state else "none",
            *(f"{relative_error(compressor, values, SAMPLE_SHAPE):.2g}" for values in (normal, double_exponential)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _paragraph(compressor: Compressor) -> str:
    facts = compressor.facts
    lines = [f"## {facts.name}", "", f"{_sentence(facts.summary)} Payload: {facts.payload} bytes."]
    if facts.agreement is not None:
        lines[-1] += f" Before, ranks reduce ({facts.agreement.value}) a proposal of {facts.proposal} bytes."
    if facts.needs_whole_parameters:
        lines[-1] += " It needs whole parameters: it cannot compress a shard."
    lines[-1] += f" {_FEEDBACK[compressor.feedback]}"
    if facts.parameters:
        lines += [
            "",
            *(
                f"- `{parameter.name}`: {parameter.meaning}; {_range(compressor, parameter)}"
                for parameter in facts.parameters
            ),
        ]
    lines += ["", f"**When:** {facts.use} **When not:** {facts.avoid}", "", f"Source: {facts.source.rstrip('.')}."]
    return "\n".join(fill(line, WIDTH, break_long_words=False, break_on_hyphens=False) for line in lines) + "\n"


def _range(compressor: Compressor, parameter: Parameter) -> str:
    field = next(field for field in fields(cast(Any, compressor)) if field.name == parameter.name)
    text = "true or false" if field.type == "bool" else parameter.range
    return text if field.default is MISSING else f"{text}, {str(field.default).lower()} unless given"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


if __name__ == "__main__":
    print(describe(), end="")
