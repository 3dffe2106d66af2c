"""fxcomp decides where gradient compression pays in a PyTorch training step, and compiles the step that does it."""

from fxcomp.cluster import Cluster, Link
from fxcomp.cost.table import CostTable
from fxcomp.errors import FxcompError
from fxcomp.feedback import ErrorFeedback
from fxcomp.job import Job
from fxcomp.pipeline import compile_step
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
    "compile_step",
]
