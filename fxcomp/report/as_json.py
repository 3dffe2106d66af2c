"""Convert the report to JSON data, with times in ms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fxcomp.cost.timeline import critical_path
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import ExchangePoint
from fxcomp.report.accumulation import accumulated
from fxcomp.report.by_layer import Row, gradients_of, layers_of
from fxcomp.report.explanation import Explanation, bucket_of, exposed_by_bucket, moves_json
from fxcomp.report.links import measured_links
from fxcomp.report.whole_job import moved_json
from fxcomp.report.wire_arithmetic import formula_lines

SCHEMA = 1
"""Version of `report.schema.json`. Adding keys does not change the version."""


def to_json(explanation: Explanation) -> dict[str, Any]:
    plan, choice, cluster = explanation.plan, explanation.choice, explanation.cluster
    waits, bound_us = exposed_by_bucket(explanation.timeline), explanation.bound_us
    return {
        "schema": SCHEMA,
        "verdict": "dense" if plan.is_dense else "compress",
        "step_ms": {
            "chosen": explanation.step_us / 1e3,
            "dense": choice.dense_us / 1e3 if choice else None,
            "bf16": choice.bf16_us / 1e3 if choice else None,
            "free": explanation.workload.free_us / 1e3,
            "bound": None if bound_us is None else bound_us / 1e3,
        },
        "batch": explanation.batch or None,
        "error": explanation.error,
        "estimate": explanation.costs.estimate or None,
        "compute": {
            "source": explanation.compute_source,
            "unpriced": _counted(explanation.unknowns.unpriced),
            "by_bytes": _counted(explanation.unknowns.by_bytes),
        },
        "accumulation": [
            {"micro_batches": number, "dense_ms": dense_us / 1e3, "chosen_ms": plan_us / 1e3}
            for number, dense_us, plan_us in accumulated(explanation)
        ],
        "critical_path": [span.task.name for span in critical_path(explanation.timeline)],
        "exposed_ms": explanation.timeline.exposed_us / 1e3,
        "measured_ms": None if math.isnan(explanation.measured_ms) else explanation.measured_ms,
        "plan": {
            "digest": plan.digest,
            "loss": explanation.spent,
            "buckets": [
                {
                    "names": list(plan.labels(bucket)),
                    "sizes": list(bucket.sizes),
                    "elements": bucket.elements,
                    "bytes": bucket.dense_bytes,
                    **({"type": bucket.element_type} if bucket.element_type is not ElementType.F32 else {}),
                    "wire_bytes": round(explanation.sent_bytes(bucket)),
                    "strategy": str(bucket.strategy),
                    **({"at": bucket.at.value} if bucket.at is not ExchangePoint.GRADIENT else {}),
                    "exposed_ms": waits.get(k, 0.0) / 1e3,
                }
                for k, bucket in enumerate(plan.buckets)
            ],
        },
        **moved_json(explanation),
        "pinned": _pinned(explanation),
        "flip_gbit": explanation.flip_gbit,
        "mode": explanation.mode,
        "budget": _budget(explanation),
        "moves": moves_json(explanation.moves),
        "cluster": {
            "hosts": cluster.hosts,
            "ranks_per_host": cluster.ranks_per_host,
            "shape": cluster.shape,
            "inter": str(cluster.inter),
            "intra": str(cluster.intra),
            "measured": measured_links(cluster, explanation.costs),
        },
        "collectives": dict(formula_lines(plan, explanation.costs, cluster, explanation.workload.shapes)),
        "device": None if explanation.device is None else explanation.device.to_json(),
        "runners": _runners(explanation),
        "race": explanation.raced.to_json() if explanation.raced else None,
        "racing": explanation.is_racing,
        "timeline": [{**task, "bucket": bucket_of(task["task"])} for task in explanation.timeline.to_json()],
        "notes": list(explanation.notes),
    }


def _runners(explanation: Explanation) -> list[dict[str, Any]]:
    """List the plans that may race; `wins` is the fraction of random cost errors under which the plan beats dense."""
    runners = explanation.choice.runners if explanation.choice else ()
    return [
        {"name": each.name, "step_ms": each.step_us / 1e3, "wins": each.wins, "loss": each.loss} for each in runners
    ]


def _pinned(explanation: Explanation) -> list[dict[str, Any]]:
    sizes = {gradient.name: gradient.dense_bytes for gradient in explanation.workload.gradients}
    return [
        {
            "pattern": rule.pattern,
            "strategy": rule.text,
            "names": names,
            "bytes": sum(sizes[name] for name in names),
        }
        for rule, names in explanation.pins.decided(sizes).items()
    ]


def _budget(explanation: Explanation) -> dict[str, Any] | None:
    budget, errors = explanation.budget, explanation.errors
    if budget is None:
        return None
    return {
        "asked": str(budget.asked),
        "allowed": explanation.allowed,
        "spent": explanation.spent,
        "measured": errors.is_measured,
        "looks": errors.looks,
        "layers": [_layer(layer) for layer in layers_of(explanation)],
        "gradients": [
            {"name": each.name, **_shares(each), "strategies": list(map(str, each.strategies))}
            for each in gradients_of(explanation)
        ],
    }


def _layer(layer: Row) -> dict[str, Any]:
    return {
        "layer": layer.name,
        "names": list(layer.names),
        "strategy": str(layer.strategies[0]),
        "pinned": layer.is_pinned,
        "buckets": list(layer.buckets),
        **_shares(layer),
    }


def _shares(row: Row) -> dict[str, Any]:
    return {
        "bytes": row.dense_bytes,
        "squares": row.squares,
        "error": row.error,
        "spent": row.spent,
        "wire_ms_saved": row.saved_us / 1e3,
    }


def _counted(operators: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"operator": name, "count": count} for name, count in operators]
