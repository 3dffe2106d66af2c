"""fxcomp decides where gradient compression pays in a PyTorch training step, and compiles the step that does it."""

from fxcomp.collector import without_collecting

with without_collecting():
    from fxcomp.cluster import Cluster, Link
    from fxcomp.cluster_file import load_cluster
    from fxcomp.cost.table import CostTable
    from fxcomp.errors import FxcompError
    from fxcomp.feedback import ErrorFeedback
    from fxcomp.job import Job
    from fxcomp.pipeline import compile_step
    from fxcomp.ranks import cluster_of_group
    from fxcomp.step import CompiledStep
    from fxcomp.strategy import Plan, Strategy

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
