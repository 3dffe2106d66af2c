"""fxcomp decides where gradient compression pays in a PyTorch training step, and compiles the step that does it."""

from fxcomp.gc_paused import gc_paused

with gc_paused():
    from fxcomp.capture.training import WeightedLoss
    from fxcomp.cluster.cluster import Cluster
    from fxcomp.cluster.cluster_file import load_cluster
    from fxcomp.cluster.link import Link
    from fxcomp.cost.table import CostTable
    from fxcomp.errors import FxcompError
    from fxcomp.frontends.average_replicas import ReplicaAverage, average_replicas
    from fxcomp.frontends.compile_step import compile_step
    from fxcomp.frontends.compress_reduce_scatter import ShardScatter, compress_reduce_scatter
    from fxcomp.frontends.ddp_hook import DdpHook, ddp_hook
    from fxcomp.frontends.job import Job
    from fxcomp.frontends.no_sync import no_sync
    from fxcomp.frontends.torch_compile import compile_model
    from fxcomp.options import Checks
    from fxcomp.plan.budget import like
    from fxcomp.plan.compress import Compress, Warmup
    from fxcomp.plan.error_feedback import ErrorFeedback
    from fxcomp.plan.plan import Plan
    from fxcomp.plan.strategy import Strategy
    from fxcomp.ranks import cluster_of_group
    from fxcomp.state.checkpoint import read_checkpoint, saved_plan
    from fxcomp.step.compiled_step import CompiledStep

__version__ = "0.1.0"
"""Version of the package."""

__all__ = [
    "Checks",
    "Cluster",
    "CompiledStep",
    "Compress",
    "CostTable",
    "DdpHook",
    "ErrorFeedback",
    "FxcompError",
    "Job",
    "Link",
    "Plan",
    "ReplicaAverage",
    "ShardScatter",
    "Strategy",
    "Warmup",
    "WeightedLoss",
    "__version__",
    "average_replicas",
    "cluster_of_group",
    "compile_model",
    "compile_step",
    "compress_reduce_scatter",
    "ddp_hook",
    "like",
    "load_cluster",
    "no_sync",
    "read_checkpoint",
    "saved_plan",
]
