"""Published schedules, on our timeline, beside what the search chooses for the same traces.

Espresso (EuroSys 2023) publishes traces of models, and for each tensor the option that it chose
(zhuangwang93/Espresso at a0294e3). `read` takes files of facts from there where they lie: `espresso_models.json`
(elements, and the gap to the gradient before), `espresso_schedules.json` (an option for each tensor),
`espresso_cost_constants.json`.

Both plans are priced by one table: links and the published compressors by the constants, everything else by the data
sheet of the V100, which they used. What an option does is written in our strategies; where theirs sends what ours
cannot say, ours is the nearest: 5 keeps gradients dense inside a host, not as FP16, and their random-k, which sends
places, is our `dgc`, priced as random-k. Of a step only backward is published:
forward is taken to be half as long. Each tensor travels alone in a published schedule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from optimality_workloads import Case, on_device, workload_of

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.modes import Mode, compressors_of
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

FORWARD = 0.5  # of backward (assumed)
STEPS_OF_ALPHA = 2  # a published latency is that of a whole ring: 2 (p - 1) of ours
LONGEST = 1 << 30  # elements
ENCODING = 0.75  # of the CPU's time for both (assumed)

OURS = {"randomk": "dgc(0.01)", "dgc": "dgc(0.01)", "efsignsgd": "sign"}
"""The published compressors by our names."""

PRICED_LIKE = {"sign": "efsignsgd", "topk(0.01)": "dgc"}
"""Our compressors and the row of constants that prices them on the GPU, whatever the schedule uses."""

CASTS = ("bf16", "fp16")

OPTIONS = {
    0: "all_reduce@world",
    1: "compress(fp16)@gpu > all_reduce@world > decompress@gpu",
    2: "reduce_scatter@intra > compress({c})@gpu > gather@inter > decompress@gpu > compress({c})@gpu > broadcast@inter"
       " > decompress@gpu > all_gather@intra",
    3: "reduce_scatter@intra > compress({c})@gpu > all_to_all@inter > decompress@gpu > compress({c})@gpu"
       " > all_gather@inter > decompress@gpu > all_gather@intra",
    4: "reduce_scatter@intra > compress({c})@gpu > all_gather@inter > decompress@gpu > all_gather@intra",
    5: "reduce_scatter@intra > compress({c})@cpu > all_to_all@inter > decompress@cpu > compress({c})@cpu"
       " > all_gather@inter > decompress@cpu > all_gather@intra",
    9: "compress({c})@gpu > all_to_all@intra > decompress@gpu > compress({c})@gpu > all_gather@inter > all_gather@intra"
       " > decompress@gpu",
    13: "compress(fp16)@gpu > reduce_scatter@intra > all_reduce@inter > all_gather@intra > decompress@gpu",
    14: "reduce_scatter@intra > all_reduce@inter > all_gather@intra",
}  # fmt: skip
"""The options of the published runtime that schedules use, as strategies."""


@dataclass(frozen=True)
class Published:
    """One schedule, where it was meant to run."""

    case: Case
    plan: Plan


def read(folder: Path) -> list[Published]:
    """Read every schedule. Raises BadOption, which says what is missing where."""
    models, schedules, constants = (
        _file(folder / f"espresso_{name}.json") for name in ("models", "schedules", "cost_constants")
    )
    place = folder
    try:
        found: list[Published] = []
        for place, schedule in schedules["schedules"].items():
            name = {"bert": "bert_base"}.get(schedule["model"], schedule["model"])
            found.append(_published(place, models["models"][name], schedule, constants))
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise BadOption(f"{place} is not as published: {type(error).__name__}: {error}") from None


def _file(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadOption(f"cannot read {path}: {error}") from None


def _published(
    name: str, model: Mapping[str, Any], schedule: Mapping[str, Any], constants: Mapping[str, Any]
) -> Published:
    cluster = _cluster(schedule, constants)
    compressor = OURS[schedule["compressor"]]
    costs = costs_of(constants, {**PRICED_LIKE, compressor: schedule["compressor"]})
    sizes = [elements for _, elements in model["tensors"]]
    gaps = list(accumulate(model["ready_gap_us"]))
    forward_us = FORWARD * gaps[-1]
    workload = workload_of([(n, forward_us + at) for n, at in zip(sizes, gaps, strict=True)], costs)
    buckets = [
        Bucket((gradient.name,), (gradient.elements,), Strategy.parse(OPTIONS[option].format(c=compressor)))
        for gradient, option in zip(workload.gradients, schedule["options"], strict=True)
    ]
    return Published(Case(name, workload, cluster, costs), Plan(tuple(buckets)))


def _cluster(schedule: Mapping[str, Any], constants: Mapping[str, Any]) -> Cluster:
    hosts, ranks = schedule["nodes"], schedule["gpus_per_node"]
    inside = constants["beta_intra_us_per_KB"]["pcie" if schedule["PCIe"] else "nvlink"]
    alpha_us, between = constants["alpha_us"], constants["beta_inter_us_per_KB"]
    return Cluster(
        hosts,
        ranks,
        intra=Link(alpha_us / (STEPS_OF_ALPHA * (ranks - 1)), 1 / inside),
        inter=Link(alpha_us / (STEPS_OF_ALPHA * (hosts - 1)), 1 / between),
    )


def costs_of(constants: Mapping[str, Any], rows: Mapping[str, str]) -> CostTable:
    """Price compressors by the constants: flat up to a size, then in proportion to it; on the CPU by a throughput."""
    gpu, flat = constants["gpu_overhead_us"], constants["gpu_overhead_us"]["base_elements"]
    us = 32e-3 / constants["cpu_throughput_Gbps"]["used_hard_coded"]  # an element, encoding and decoding
    costs = on_device("v100")
    table = dict(costs.compressors)
    for name in dict.fromkeys([*map(str, compressors_of(Mode.AGGRESSIVE)), *rows, *CASTS]):
        compressor = parse_compressor(name)
        row, option = ("randomk", 1) if name in CASTS else (rows.get(name), 2)  # FP16, and compressing once
        if row is not None:
            decode_us = gpu[row][1][option]
            table[f"{compressor}@gpu"] = _rising(gpu[row][0][option] - decode_us, decode_us, flat)
        table[f"{compressor}@cpu"] = _rising(us * ENCODING, us * (1 - ENCODING), 1)
    return replace(costs, compressors=table)


def _rising(encode_us: float, decode_us: float, flat: int) -> CompressorCost:
    """One payload is priced, as published, however many there are."""
    sizes = [*dict.fromkeys((1, flat)), LONGEST]
    return CompressorCost.of(
        *(
            CompressorPoint(n, encode_us * max(1.0, n / flat), decode_us * max(1.0, n / flat), 0.0, decode_more_us=0.0)
            for n in sizes
        )
    )


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Both plans' steps, ours against theirs."""
    lines = [
        "| schedule | tensors | dense, ms | published, ms | ours, ms | ours against published | above the bound |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        against, above = row["step_ms"] / row["published_ms"] - 1, row["step_ms"] / row["bound_ms"] - 1
        cells = [row["workload"], str(row["tensors"])]
        cells += [f"{row[key]:.2f}" for key in ("dense_ms", "published_ms", "step_ms")]
        lines.append(f"| {' | '.join([*cells, f'{against:+.1%}', f'{above:.1%}'])} |")
    return "\n".join(lines) + "\n"
