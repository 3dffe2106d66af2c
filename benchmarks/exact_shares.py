"""Share of gradients of public models that the graph proves to be casts of bf16 values, under bf16 autocast.

    python benchmarks/exact_shares.py --json exact_shares.json
    python benchmarks/exact_shares.py --only gpt2 --only resnet

A small model of each family (`public_families.py`) is captured, and `fxcomp/graph/exact_type.py` proves its gradients.
Every proved gradient is then compared with eager PyTorch's: all values must be bf16 numbers. The share is counted in
the library's default configuration, built without memory: a parameter is proved if the small model's parameter of the
same name, but for numbers, is proved.

Requires the extra `models`. Thirty families take three minutes.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from public_families import COMMON, Family, loss_of, small
from records import Records, options, table
from torch import Tensor, nn

from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.errors import FxcompError
from fxcomp.graph.edit import gradients
from fxcomp.graph.exact_type import computed_by, exact_types

BF16 = torch.bfloat16


def measure(name: str) -> dict[str, Any]:
    family = small(name)
    torch.manual_seed(0)
    model = family.build()
    batch = family.batch(model, 0)
    training = Training.of(model, loss_under_autocast, torch.optim.AdamW(model.parameters(), lr=1e-3))
    graph = capture(training, batch).graph
    proved = exact_types(graph)
    others = Counter(computed_by(node) for key, node in gradients(graph).items() if key not in proved)
    wrong = not_exact(model, loss_under_autocast, batch, set(proved))
    whole, exact = shares_of_default(family, model, set(proved))
    return {
        "family": name,
        "task": family.task,
        "values": whole,
        "share": exact / whole,
        "proved": len(proved),
        "wrong": wrong,
        "others": dict(others.most_common()),
    }


def loss_under_autocast(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    with torch.autocast("cpu", BF16):
        return loss_of(model, batch)


def not_exact(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, proved: set[str]) -> list[str]:
    """Return the proved parameters whose eager gradient has values that are no bf16 numbers."""
    loss_fn(model, batch).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if name in proved}
    return [n for n, g in found.items() if g is not None and not torch.equal(g.to(BF16).float(), g)]


def shares_of_default(family: Family, model: nn.Module, proved: set[str]) -> tuple[int, int]:
    """Count the values of the default configuration, and those of proved parameters."""
    names = {pattern(name) for name in proved}
    against = {pattern(name) for name, _ in model.named_parameters()} - names
    with torch.device("meta"):
        whole = family.model_class(type(family.config)())
    counted: Counter[bool] = Counter()
    for name, parameter in whole.named_parameters():
        kind = pattern(name)
        counted[kind in names and kind not in against] += parameter.numel()
    return counted.total(), counted[True]


def pattern(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", action="append", choices=COMMON, help="a family; may be repeated")
    parser.add_argument("--report", type=Path, metavar="FILE", help="the table in Markdown")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    kept = Records(arguments.json)
    for name in arguments.only or COMMON:
        try:
            found = measure(name)
        except FxcompError as error:
            print(f"{name}: {error}", flush=True)
            continue
        kept.add(found)
        print(f"{name}: {found['share']:.1%} of {found['values']:,}, wrong {found['wrong']}", flush=True)
    rows = [
        (each["family"], f"{each['values'] / 1e6:,.0f} M", f"{each['share']:.1%}", ", ".join(list(each["others"])[:3]))
        for each in kept.found
    ]
    text = table("family | values > | proved > | others are computed by", rows)
    print(text)
    if arguments.report:
        arguments.report.write_text(text + "\n")


if __name__ == "__main__":
    main()
