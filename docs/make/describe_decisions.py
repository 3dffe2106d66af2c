"""Write docs/how_fxcomp_decides.md: one small job, decided by the code that decides all of them.

    PYTHONPATH=tests python docs/make/describe_decisions.py > docs/how_fxcomp_decides.md

The job is in `decision_example.py`, the race in `describe_race.py`. Words are there and here; every number, plan and
timeline is made.
"""

from __future__ import annotations

from dataclasses import replace

from decision_example import (
    CLUSTER,
    COMPRESSOR_START_US,
    COMPRESSORS_US,
    COSTS,
    LINK,
    MODE,
    WORKLOAD,
)
from describe_race import gate, race
from helpers.optimum.oracle import EXACT, optimum

from fxcomp.cost.timeline import Span, Timeline, simulate
from fxcomp.plan.budget import plan_error, strategy_error
from fxcomp.plan.given import strategy_named
from fxcomp.plan.kinds import WIRES, Stream
from fxcomp.plan.modes import Content, error_limit, strategies
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.report.draw_timeline import draw_timeline, legend
from fxcomp.report.wire_arithmetic import sent_by
from fxcomp.search.bound import bound_us
from fxcomp.search.choose import Choice, bf16_everywhere, choose, predict_us, uniform
from fxcomp.search.plan_tasks import StepPrices, plan_tasks

WIDTH = 110  # of a drawn timeline
UNIFORM = ("bf16", "int8", "int4")

HEAD = """\
# How fxcomp decides

Made by `PYTHONPATH=tests python docs/make/describe_decisions.py`: edit that file or `describe_race.py` beside it,
not this page.

A plan says which gradients travel together (buckets) and how each bucket travels (its [strategy](strategies.md)). One
number judges a plan: the end of the simulated step. Bytes do not count, and time on the wire does not count where
compute hides it. This page decides one small step by hand, with numbers that the code prints.

## The step

There are two hosts of one rank each. Forward and backward take {backward:.0f} ms and make five gradients on the way. A
gradient is *ready* when compute has made it, if nothing delays compute. Without a network the step takes {free:.2f} ms,
updates included.

"""

COSTS_WORDS = """
## Prices

These costs are made up and round. In a real job `compile_step` measures them on your ranks ([costs](costs.md)).

| what | price |
|---|---|
| link between the hosts | latency α = {alpha:.0f} µs, bandwidth B = {gb_per_s} GB/s = {bytes_per_us:.0f} bytes per µs |
| packing a bucket | its bytes at {pack:.0f} GB/s |
| starting a collective | {launch:.0f} µs of the main thread |
| compressing, decompressing | {start:.0f} µs each, and for a million values: {million} |

A ring all_reduce of n bytes over p ranks takes 2 (p − 1) latencies, and every rank sends 2 (p − 1) / p · n bytes. With
p = 2 that is 2 α + n / B. Payloads of int8 and int4 cannot be added up on the wire, so every rank sends its own to all
others. Such an all_gather takes α + (p − 1) n / B for payloads of n bytes, and every rank decompresses all p of them.
These are four ways to send the largest gradient, `{largest}`:

"""

ONE_WORDS = """
If compute hid nothing, the last column would decide. It does not, because gradients become ready while backward still
computes.

## Candidate plans

The search starts from simple plans: one strategy everywhere, in buckets of a few sizes. It then changes one bucket at a
time (another strategy, a split, a merge, a moved border), and simulates the step of each change. Dense and each of the
uniform plans are candidates too.

"""

DENSE_WORDS = """
## The dense plan on the timeline

A task starts when its stream is free and what it waits for is done. The fastest dense plan has {buckets}:

"""

ARITHMETIC_WORDS = """
This is the arithmetic, in µs. A bucket is *on the wire from* the later of two moments: it is packed and started, or the
bucket before it has left the link.

"""

DENSE_END = """
The last bucket arrives at {arrived:,.0f} µs and its update takes {update:,.0f} µs, so the step ends at {end:,.0f} µs.
Compute is busy for {busy:,.0f} µs of that and waits for {exposed:,.0f} µs. It is *exposed*: no plan can save more.

## The choice

{plan}
"""

CHOICE_END = """
The step ends at {end:,.0f} µs, {saved:,.0f} µs earlier than dense, with {exposed:,.0f} µs exposed. It sends
{sent:.2f} MB instead of {dense:.2f} MB. The table says how much longer the step would be if one bucket had another
strategy and all others stayed as they are:

"""

ALTERNATIVES_END = """
Fewer bytes are no gain where compute hides the wire and nothing hides the compressor. Of two plans with the same
predicted step, the one with the smaller error wins.
"""

BUDGET_WORDS = """
## The error budget

Compressing loses precision. A mode bounds the total. The error of a strategy is |applied − mean|² / |mean|² for
Gaussian gradients, before error feedback gives it back. A plan's error weighs each bucket by its elements:

"""

BUDGET_END = """
`{mode}` allows {limit}: four bits a value everywhere, in both of two shots. How losses fare under it is
[measured](benchmarks/convergence.md). A plan beyond the limit is no candidate, whatever it would save.
"""

BOUND = """
## Distance from the best plan

A step is at least as long as the work of each stream. Compute runs backward, every update and its share of all buckets.
The link starts no gradient before it is ready, and compute has work left after the last one has arrived. Every weighted
mean of such sums is a bound too, if each element is sent as cheaply as the error budget allows. The best of these means
bounds all plans of the mode from below: {bound:,.0f} µs. The chosen step is
{gap:.1f} % longer. The report prints this gap for every plan that was chosen.

The bound is proved but seldom reached, because an element may be cheap for each stream in another way. A job this small
can also be solved exactly (`tests/helpers/optimum/oracle.py`). After {looked_at:,} partial plans, the best of all takes
{best:,.0f} µs, {verdict}.
"""


def describe() -> str:
    """Write the whole page."""
    choice = choose(WORKLOAD, COSTS, CLUSTER, MODE)
    decided = [_candidates(choice), _dense(choice), _chosen(choice)]
    return "".join([_step(), _costs(), *decided, _bound(choice), _budget(choice), gate(choice), race(choice)])


def timeline_of(plan: Plan) -> Timeline:
    """Simulate a plan of the example."""
    return simulate(plan_tasks(WORKLOAD, plan, COSTS, CLUSTER), COSTS.processors)


def table(head: str, rows: list[str]) -> str:
    """Write a Markdown table whose first column is text and whose others are numbers."""
    columns = head.count("|") - 1
    return "\n".join([head, "|---|" + "--:|" * (columns - 1), *rows]) + "\n"


def _step() -> str:
    rows = [
        f"| `{each.name}` | {'×'.join(map(str, each.shape))} | {each.elements:,} | {4 * each.elements / 1e6:.3f} "
        f"| {each.ready_us:,.0f} | {each.update_us:,.1f} |"
        for each in WORKLOAD.gradients
    ]
    words = HEAD.format(backward=WORKLOAD.backward_us / 1e3, free=WORKLOAD.free_us / 1e3)
    return words + table("| gradient | shape | elements | MB | ready, µs | update, µs |", rows)


def _costs() -> str:
    largest = max(WORKLOAD.gradients, key=lambda gradient: gradient.elements)
    words = COSTS_WORDS.format(
        alpha=LINK.alpha_us,
        gb_per_s=LINK.gb_per_s,
        bytes_per_us=LINK.gb_per_s * 1e3,
        pack=COSTS.pack_gb_per_s,
        launch=COSTS.launch_us,
        start=COMPRESSOR_START_US,
        million="; ".join(f"{name} {encode:.0f}, {decode:.0f} µs" for name, (encode, decode) in COMPRESSORS_US.items()),
        largest=largest.name,
    )
    rows: list[str] = []
    for name in ("dense", *UNIFORM):
        bucket = Bucket((largest.name,), (largest.elements,), strategy_named(name))
        (sent,) = sent_by(bucket, CLUSTER, WORKLOAD.shapes)
        wire_us = COSTS.collective(sent.send.kind, sent.send.level, sent.size, CLUSTER).us
        compress_us, decompress_us = _compressing_us(bucket)
        latencies = round((wire_us - sent.size / (LINK.gb_per_s * 1e3)) / LINK.alpha_us)
        rows.append(
            f"| {name} | {sent.size:,} | {latencies} · {LINK.alpha_us:.0f} + {sent.size:,} / {LINK.gb_per_s * 1e3:.0f} "
            f"= {wire_us:,.0f} | {compress_us:,.0f} | {decompress_us:,.0f} "
            f"| {wire_us + compress_us + decompress_us:,.0f} |"
        )
    return words + table("| strategy | bytes | wire, µs | compress, µs | decompress, µs | sum, µs |", rows)


def _compressing_us(bucket: Bucket) -> tuple[float, float]:
    compressor = bucket.strategy.compressor
    if compressor is None:
        return 0.0, 0.0
    payloads = 1 if compressor.is_linear else CLUSTER.world_size
    return COSTS.encode_us(compressor, bucket.elements), COSTS.decode_us(compressor, bucket.elements, payloads)


def _candidates(choice: Choice) -> str:
    plans = {"dense": choice.dense}
    plans |= {f"{name} everywhere": uniform(name, WORKLOAD, COSTS, CLUSTER) for name in UNIFORM}
    plans["bf16 everywhere"] = bf16_everywhere(StepPrices(WORKLOAD, COSTS, CLUSTER))
    plans["the search's best"] = choice.fastest
    rows: list[str] = []
    for name, plan in plans.items():
        us, exposed_us = predict_us(WORKLOAD, plan, COSTS, CLUSTER), timeline_of(plan).exposed_us
        rows.append(
            f"| {name} | {len(plan.buckets)} | {_sent_mb(plan):.2f} | {us / 1e3:.2f} | {exposed_us / 1e3:.2f} |"
        )
    rows.append(f"| no network | | | {choice.free_us / 1e3:.2f} | |")
    return ONE_WORDS + table("| plan | buckets | MB sent | step, ms | exposed, ms |", rows)


def _dense(choice: Choice) -> str:
    timeline = timeline_of(choice.dense)
    last = max((span for span in timeline.spans if span.task.stream in WIRES), key=lambda span: span.end_us)
    last_update = max((span for span in timeline.spans if _is(span, "update")), key=lambda span: span.end_us)
    end = DENSE_END.format(
        arrived=last.end_us,
        update=last_update.task.duration_us,
        end=timeline.step_time_us,
        busy=timeline.busy_us(Stream.COMPUTE),
        exposed=timeline.exposed_us,
        plan=_drawn(choice.fastest),
    )
    words = DENSE_WORDS.format(buckets=f"{len(choice.dense.buckets)} buckets")
    return words + _drawn(choice.dense) + ARITHMETIC_WORDS + _arithmetic(choice.dense, timeline) + end


def _drawn(plan: Plan) -> str:
    timeline = timeline_of(plan)
    buckets = "\n".join(f"bucket {k}: {', '.join(each.names)}: {each.strategy}" for k, each in enumerate(plan.buckets))
    drawing = "\n".join([*draw_timeline(timeline, WIDTH), "", f"  {legend([timeline])}"])
    return f"```text\n{buckets}\n\n{drawing}\n```\n"


def _arithmetic(plan: Plan, timeline: Timeline) -> str:
    """Write a bucket's way through the timeline: what is started when, and what that is the sum of."""
    rows: list[str] = []
    for k, bucket in enumerate(plan.buckets):
        mine = [span for span in timeline.spans if span.task.name.split()[-1] == str(k)]
        (sent,) = [span for span in mine if span.task.stream in WIRES]
        size = sent_by(bucket, CLUSTER, WORKLOAD.shapes)[0].size
        update = next(span for span in mine if _is(span, "update"))
        before_wire = next(span for span in mine if _is(span, "start"))
        rows.append(
            f"| {k} | {next(span for span in mine if _is(span, 'pack')).start_us:,.0f} | {before_wire.end_us:,.0f} "
            f"| {sent.start_us:,.0f} | {size:,} | {sent.task.duration_us:,.0f} | {sent.end_us:,.0f} "
            f"| {update.end_us:,.0f} |"
        )
    head = "| bucket | complete | started | on the wire from | bytes | wire | arrived | updated |"
    return table(head, rows)


def _is(span: Span, what: str) -> bool:
    return span.task.name.split()[0] == what


def _chosen(choice: Choice) -> str:
    timeline = timeline_of(choice.fastest)
    words = CHOICE_END.format(
        end=timeline.step_time_us,
        saved=choice.dense_us - timeline.step_time_us,
        exposed=timeline.exposed_us,
        sent=_sent_mb(choice.fastest),
        dense=_sent_mb(choice.dense),
    )
    rows: list[str] = []
    others = ("dense", *UNIFORM)
    for k, bucket in enumerate(choice.fastest.buckets):
        cells: list[str] = []
        for name in others:
            changed = replace(bucket, strategy=strategy_named(name))
            buckets = (*choice.fastest.buckets[:k], changed, *choice.fastest.buckets[k + 1 :])
            us = predict_us(WORKLOAD, Plan(buckets), COSTS, CLUSTER) - choice.fastest_us
            cells.append("chosen" if changed == bucket else f"{us:+,.0f}" if _is_offered(changed) else "not offered")
        rows.append(f"| {k}: {', '.join(f'`{name}`' for name in bucket.names)} | {' | '.join(cells)} |")
    head = f"| bucket | {' | '.join(f'{name}, µs' for name in others)} |"
    arithmetic = _arithmetic(choice.fastest, timeline)
    return arithmetic + words + table(head, rows) + ALTERNATIVES_END


def _is_offered(bucket: Bucket) -> bool:
    """Return whether the mode has this strategy for what the bucket holds."""
    are_vectors = {gradient.is_vector for gradient in WORKLOAD.gradients if gradient.name in bucket.names}
    content = Content.MIXED if len(are_vectors) == 2 else Content.VECTORS if True in are_vectors else Content.MATRICES
    return bucket.strategy in strategies(MODE, CLUSTER, content, offload=COSTS.offloads)


def _sent_mb(plan: Plan) -> float:
    return sum(sent.size for bucket in plan.buckets for sent in sent_by(bucket, CLUSTER, WORKLOAD.shapes)) / 1e6


def _budget(choice: Choice) -> str:
    rows: list[str] = []
    for k, bucket in enumerate(choice.fastest.buckets):
        error = strategy_error(bucket.strategy, CLUSTER)
        name = bucket.strategy.compressor or "dense"
        rows.append(f"| {k}: {name} | {bucket.elements:,} | {error:.2g} | {bucket.elements * error:,.0f} |")
    elements, error = sum(each.elements for each in choice.fastest.buckets), plan_error(choice.fastest, CLUSTER)
    rows.append(f"| the plan | {elements:,} | {error:.2g} | {elements * error:,.0f} |")
    limit = error_limit(MODE)
    rows.append(f"| the limit | {elements:,} | {limit:.2g} | {elements * limit:,.0f} |")
    words = BUDGET_END.format(mode=MODE.value, limit=limit)
    return BUDGET_WORDS + table("| bucket | elements | error | elements · error |", rows) + words


def _bound(choice: Choice) -> str:
    bound = bound_us(WORKLOAD, COSTS, CLUSTER, MODE)
    best = optimum(WORKLOAD, COSTS, CLUSTER, MODE)
    off = choice.fastest_us / best.step_us - 1
    return BOUND.format(
        bound=bound,
        gap=100 * (choice.fastest_us / bound - 1),
        looked_at=best.looked_at,
        best=best.step_us,
        verdict="which is the plan above" if off < EXACT else f"and the search's is {off:.2%} longer",
    )


if __name__ == "__main__":
    print(describe(), end="")
