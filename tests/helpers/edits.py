"""Change a compiled step's final graph and run what comes out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule

from fxcomp.codegen.program import load_program
from fxcomp.graph.edit import call, clone, gradients
from fxcomp.graph.info import Role, info, update_info
from fxcomp.pipeline import Compiler
from fxcomp.runtime.runtime import Runtime
from fxcomp.step.compiled_step import CompiledStep
from helpers.workloads import cluster


def rerun_with(step: CompiledStep, edit: Callable[[GraphModule], None]) -> None:
    """Edit a copy of the final graph, emit it again, and let the step run that from now on."""
    program = step.in_force.program
    gm = clone(step.graph())
    edit(gm)
    gm.graph.lint()
    timeline = Compiler(cluster(2, 1, "1gbit")).predicted(gm, step.costs)
    changed = load_program(program.captured, gm, program.replay, timeline)
    step.in_force.programs.exchange(program, changed)
    step.in_force.program = changed
    step.in_force.runtime = Runtime(
        step.in_force.runtime.transport, step.training.device
    )  # buffers are kept by name, and may have another size now


def scale_gradient(gm: GraphModule, name: str, factor: float) -> None:
    """Plant a wrong gradient."""
    gradient = gradients(gm)[name]
    label = info(gradient)
    users = list(gradient.users)
    with gm.graph.inserting_after(gradient):
        scaled = call(gm.graph, torch.ops.aten.mul.Tensor, (gradient, factor), label, name="planted")
    for user in users:
        user.replace_input_with(gradient, scaled)
    update_info(gradient, role=Role.COMPUTE, parameter=None)
