"""A linear step brought as far as a pass needs it."""

from torch.fx import GraphModule

from fxcomp.cluster.cluster import Cluster
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.passes.assign_streams import assign_streams
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.lower_strategies import lower_strategies
from fxcomp.passes.thread_state import thread_state
from fxcomp.plan.plan import Plan
from helpers.graphs import COSTS, linear_step


def bucketed(plan: Plan, cluster: Cluster, *, clip: bool = False) -> GraphModule:
    return bucket_gradients(canonicalize_sync(linear_step(clip=clip), cluster.world_size), plan)


def lowered(plan: Plan, cluster: Cluster, *, rank: int = 0, clip: bool = False) -> GraphModule:
    return lower_strategies(bucketed(plan, cluster, clip=clip), plan, cluster, rank)


def priced(plan: Plan, cluster: Cluster, *, clip: bool = False) -> GraphModule:
    gm = thread_state(lowered(plan, cluster, clip=clip))
    return assign_streams(annotate_costs(gm, COSTS, cluster), cluster)
