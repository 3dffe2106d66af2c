"""A linear step brought as far as a pass needs it."""

from graphs import COSTS, linear_step
from torch.fx import GraphModule

from fxcomp.cluster.cluster import Cluster
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.passes.assign_streams import assign_streams
from fxcomp.passes.bucket_gradients import bucket_gradients
from fxcomp.passes.canonicalize_sync import canonicalize_sync
from fxcomp.passes.insert_compression import insert_compression
from fxcomp.passes.split_by_level import split_by_level
from fxcomp.passes.thread_state import thread_state
from fxcomp.plan.plan import Plan


def bucketed(plan: Plan, cluster: Cluster, *, clip: bool = False) -> GraphModule:
    return bucket_gradients(canonicalize_sync(linear_step(clip=clip), cluster.world_size), plan)


def compressed(plan: Plan, cluster: Cluster, *, clip: bool = False) -> GraphModule:
    gm = split_by_level(bucketed(plan, cluster, clip=clip), plan, cluster)
    return insert_compression(gm, plan, cluster, 0)


def priced(plan: Plan, cluster: Cluster, *, clip: bool = False) -> GraphModule:
    gm = thread_state(compressed(plan, cluster, clip=clip))
    return assign_streams(annotate_costs(gm, COSTS, cluster), cluster)
