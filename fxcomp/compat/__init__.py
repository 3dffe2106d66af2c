"""The private parts of torch that fxcomp needs, and what differs between torch 2.11 and 2.13 and between systems.

- tracing, symbols, graphs: make_fx on fake tensors, symbolic numbers, torch.fx's internals.
- operators, tensors, hooks: facts about ATen operators, tensors, and hooks of modules and optimizers.
- dynamo: torch.compile's parts.
- groups, collectives: process groups, and the collectives of a user's loss function.
- source_lines, machine, files: the user's line, the machine, atomic writes.
"""

# ruff: noqa: F401, I001
# pyright: reportUnusedImport=false
# fmt: off
from fxcomp.compat.collectives import (
    OBJECTS, carries_objects, finished_work, is_functional_collective, reduction, without_hidden_communication,
)
from fxcomp.compat.dynamo import (
    compile_training, gradient_places, graph_break, inside_ddp, run_eagerly, source_name, standalone_compile,
)
from fxcomp.compat.files import cache_directory, write_atomically
from fxcomp.compat.graphs import append_copy, copied, graph_module
from fxcomp.compat.groups import (
    all_gather, count_groups_from, default_group, default_store, destroy_groups, group_name, group_timeout,
    groups_made, is_lost_connection, process_group, reduce_scatter, set_once,
)
from fxcomp.compat.hooks import count_as_stepped, global_module_hooks, optimizer_hooks
from fxcomp.compat.machine import (
    OUT_OF_MEMORY, forget_freed_memory, host_name, machine_name, processor_name, processor_quota, processors,
    spare_bytes, synchronize, usable_processors,
)
from fxcomp.compat.operators import (
    bare_name, communicates, direct_aten, draws, flops, functional_operator, has_effect, has_flop_formula, has_results,
    is_bound_by_memory, is_higher_order, is_in_place, is_operator, is_pointwise, is_profiler, is_random, is_view,
    moves_tensors, multiplies_in_tf32, named_arguments, places_of_arguments, written_arguments,
)
from fxcomp.compat.source_lines import users_level, users_line, users_source
from fxcomp.compat.symbols import (
    SYMBOLS, as_number, has_symbols, is_open, limit, live_number, shape_guard, size_hint, symbols, unbacked_symbols,
    without_locations,
)
from fxcomp.compat.tensors import is_fake, is_subclass, strides, suggested_format
from fxcomp.compat.tracing import (
    DATA_DEPENDENT, DispatchMode, FakeMode, fake_mode, fake_with_dynamic_dims, plain_values, real_tensors, trace,
    trace_functional, without_autocast, without_onednn,
)
