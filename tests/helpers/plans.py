"""Plans by hand for the small jobs, and the cluster that plans by level need."""

from __future__ import annotations

from torch import nn

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

TWO_HOSTS = Cluster(2, 2, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1))


def plan_in_turns(model: nn.Module, strategies: list[Strategy], per_bucket: int = 1) -> Plan:
    """Deal the strategies in turns to buckets of so many parameters, last parameters first."""
    named = list(model.named_parameters())[::-1]
    groups = [named[k : k + per_bucket] for k in range(0, len(named), per_bucket)]
    return Plan(
        tuple(
            Bucket(
                tuple(n for n, _ in group),
                tuple(p.numel() for _, p in group),
                strategies[k % len(strategies)],
                element_type=ElementType.of(group[0][1].dtype),
            )
            for k, group in enumerate(groups)
        )
    )
