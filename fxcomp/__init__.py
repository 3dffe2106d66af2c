"""fxcomp decides where gradient compression pays in a PyTorch training step, and compiles the step that does it."""

from fxcomp.gc_paused import gc_paused

with gc_paused():
    from fxcomp.cluster.cluster import Cluster
    from fxcomp.cluster.cluster_file import load_cluster
    from fxcomp.cluster.link import Link
    from fxcomp.cost.table import CostTable
    from fxcomp.errors import FxcompError
    from fxcomp.frontends.compile_step import compile_step
    from fxcomp.frontends.job import Job
    from fxcomp.plan.error_feedback import ErrorFeedback
    from fxcomp.plan.plan import Plan
    from fxcomp.plan.strategy import Strategy
    from fxcomp.ranks import cluster_of_group
    from fxcomp.step.compiled_step import CompiledStep

__all__ = [
    "Cluster",
    "CompiledStep",
    "CostTable",
    "ErrorFeedback",
    "FxcompError",
    "Job",
    "Link",
    "Plan",
    "Strategy",
    "cluster_of_group",
    "compile_step",
    "load_cluster",
]
