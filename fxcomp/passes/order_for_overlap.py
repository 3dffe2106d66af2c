"""Start every collective once its bucket is complete, and wait just before the update.

      %all_gather_1_int4         collective  u8[16]    25.1 us @inter   all_gather(%payload_1, 2, world)
    + %wait_0                    wait        f32[4]                     wait(%all_reduce_0)
    + %split_with_sizes_default  unpack      (f32[4])                   aten.split_with_sizes(%wait_0, [4])
      %payloads_1                wait        u8[16]                     wait(%all_gather_1_int4)
      %mean_1                    decompress  f32[8]    2.0 us @compute  int4_decompress(%payloads_1, 2, [8], 128, False)
    - %wait_0                    wait        f32[4]                     wait(%all_reduce_0)
    - %split_with_sizes_default  unpack      (f32[4])                   aten.split_with_sizes(%wait_0, [4])

1. Per bucket: run compute up to its last gradient, pack, compress, and start the first collective. Later stages of
   earlier buckets follow, with the pool's last decompression.
2. Run the rest of compute.
3. Per bucket: wait, decompress, update. With clipping: all waits, the norm, all updates. With a commit (`all_finite`):
   all waits, received buffers, the commit, the norm, all updates.

The order depends only on the plan's schedule, so all ranks start collectives in the same order. Updates
write parameters in place, so they follow all compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from torch.fx import GraphModule, Node

from fxcomp.graph.edit import result_of
from fxcomp.graph.info import BUCKET_LINES, Role, info
from fxcomp.graph.ops import CAST, H2D
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy

_LOCAL = (Role.GRADIENT, Role.PART)
_BODY = (Role.COMPUTE, Role.COUNT, Role.ARRIVE, Role.EXCHANGE, Role.RANDOM_STATE, *_LOCAL)


def order_for_overlap(gm: GraphModule, plan: Plan) -> GraphModule:
    nodes = list(gm.graph.nodes)
    inputs = [n for n in nodes if n.op in ("placeholder", "get_attr")]
    body = _with_results([n for n in nodes if _is_body(n)])
    order = [*inputs, *_launch_during(body, nodes, plan)]
    commits = [n for n in nodes if info(n).role in (Role.COMMIT, Role.ROLL_BACK)]
    placed = {*order, *commits}

    finals = [n for k in range(len(plan.buckets)) for n in nodes if n not in placed and info(n).bucket == k]
    placed.update(finals)
    updates = _updates_by_bucket([n for n in nodes if info(n).role is Role.UPDATE and n not in placed], plan)
    clips = [n for n in nodes if info(n).role is Role.CLIP]
    placed.update(clips, *updates.values())
    rest = [n for n in nodes if n not in placed]

    if commits:
        arriving = [n for n in finals if info(n).role is not Role.UNPACK]
        finals = [n for n in finals if info(n).role is Role.UNPACK]
        order += [*arriving, *(n for n in rest if n.op != "output"), *commits]
        rest = [n for n in rest if n.op == "output"]
    if clips or commits:
        order += [*finals, *clips, *(n for group in updates.values() for n in group), *rest]
    else:
        for number in range(len(plan.buckets)):
            order += [n for n in finals if info(n).bucket == number] + updates.pop(number, [])
        order += [*(n for group in updates.values() for n in group), *rest]
    return _reordered(gm, order)


def _is_body(node: Node) -> bool:
    """Return whether a node belongs to forward or backward, or to the start of the broadcast of buffers."""
    label = info(node)
    if node.op != "call_function":
        return False
    return label.role in _BODY or (label.bucket is None and label.role in (Role.PACK, Role.COLLECTIVE))


def _with_results(body: list[Node]) -> list[Node]:
    """Return the body with each operator's results directly after it."""
    inside = set(body)
    results: dict[Node, list[Node]] = {}
    for node in body:
        if (source := result_of(node)) in inside:
            results.setdefault(source, []).append(node)
    moved = {node for each in results.values() for node in each}
    found: list[Node] = []
    for node in body:
        if node not in moved:
            found.append(node)
            found += _all_results(node, results)
    return found


def _all_results(node: Node, results: Mapping[Node, list[Node]]) -> Iterator[Node]:
    for each in results.get(node, ()):
        yield each
        yield from _all_results(each, results)


def _launch_during(body: list[Node], nodes: list[Node], plan: Plan) -> Iterable[Node]:
    """Yield the body, and after each region the stages that the plan's schedule starts there."""
    stages: dict[tuple[int, int], list[Node]] = {}
    for node in nodes:
        label = info(node)
        if (
            label.bucket is not None
            and label.role in BUCKET_LINES
            and _starts_early(node, plan.buckets[label.bucket].strategy)
        ):
            stages.setdefault((label.bucket, label.stage), []).append(node)

    place = {node: i for i, node in enumerate(body)}
    ends = [_buffers_leave(body, nodes)]  # followed by the index after each bucket's last gradient
    for number in range(len(plan.buckets)):
        names = plan.buckets[number].names
        last = max((place[n] for n in body if info(n).role in _LOCAL and info(n).parameter in names), default=-1)
        end = last + 1
        while end < len(body) and result_of(body[end]) is not None:  # one of several results
            end += 1
        ends.append(max(end, ends[-1]))

    done = 0
    for launch in plan.schedule():
        end = ends[launch.region + 1]
        yield from body[done : max(done, end)]
        done = max(done, end)
        yield from stages.get((launch.bucket, launch.stage), [])
    yield from body[done:]


def _starts_early(node: Node, strategy: Strategy) -> bool:
    """Return whether a line runs during compute, before the main thread waits for the bucket's last result."""
    stage, is_final = info(node).stage, info(node).stage == len(strategy.collectives)
    return stage < strategy.started_stages and not (is_final and node.target in (H2D, CAST))


def _buffers_leave(body: list[Node], nodes: list[Node]) -> int:
    """Return the first index in `body` at which stages may start: after an early broadcast of buffers."""
    if not any(info(node).leaves_early for node in nodes):
        return 0
    return max((i + 1 for i, node in enumerate(body) if info(node).role is Role.COLLECTIVE), default=0)


def _updates_by_bucket(updates: list[Node], plan: Plan) -> dict[int, list[Node]]:
    bucket_of = {name: number for number, bucket in enumerate(plan.buckets) for name in bucket.names}
    found: dict[int, list[Node]] = {}
    for node in updates:
        number = bucket_of.get(str(info(node).parameter), len(plan.buckets))
        found.setdefault(number, []).append(node)
    return dict(sorted(found.items()))


def _reordered(gm: GraphModule, order: list[Node]) -> GraphModule:
    assert len(order) == len(gm.graph.nodes), "an order names every node once"
    for before, node in itertools.pairwise(order):
        before.append(node)
    return gm
