"""Private parts of torch, and differences between torch 2.11 and 2.13 and between systems.

- tracing, constants, symbols, answers, graphs: make_fx on fakes, symbols and their guard, torch.fx.
- operators: facts about ATen operators; collectives of a loss function.
- optimizers: initial state, GradScaler, hooks, facts about tensors.
- absent_device, absent_cuda, cuda_autocast, cuda_attention: imitation of an absent GPU.
- modes: a thread's modes and settings, random generators.
- dynamo, fsdp: torch.compile; wrappers around a user's model.
- groups: process groups.
- streams: asynchronous devices.
- structured: torch's structured trace.
- source_lines, machine, files: the user's line, the machine, atomic writes.
"""

# ruff: noqa: F401, I001
# pyright: reportUnusedImport=false
# fmt: off
from fxcomp.compat.absent_cuda import DeviceFacts
from fxcomp.compat.absent_device import as_if_on, imagined_device, unwrapped
from fxcomp.compat.answers import (
    AskingShapes, Expression, as_symbol, can_fail, current_tracer, evaluator, gradient_of, node_of, symbols_of,
    unknown_size,
)
from fxcomp.compat.constants import traced, trained_outside
from fxcomp.compat.dynamo import (
    RUN_WITH_RNG_STATE, Backward, backward, backward_call, backward_node, before_backward, compile_training,
    compile_training_with_inductor, compiled_functions_eager, draws_by_seed, gradient_places, graph_break, inside_ddp,
    is_cached, is_restart, leaves_of, nodes_of, outside_dynamo, register_hook, run_eagerly, source_name,
    standalone_compile, suppresses_errors, uncompiled, why_not_compiled, will_accumulate,
    will_run_backward,
)
from fxcomp.compat.files import (
    CHECKSUM, alone_on_this_machine, cache_directory, checksum, read_json, save_json, sealed, write_atomically,
)
from fxcomp.compat.fsdp import (
    GradBucket, Scatter, ShardedModule, at_end_of_backward, finds_unused,
    group_ranks, largest, local_part, sharded_modules, wrapper_of,
)
from fxcomp.compat.graphs import append_copy, copied, graph_module
from fxcomp.compat.groups import (
    DeviceMesh, ProcessGroup, all_gather, backend_names, default_group, default_store,
    destroy_groups, group_name, group_timeout, is_lost_connection, is_of_another_process, is_store_gone,
    leave_store, new_group, outlives_restarts, process_group, reduce_scatter, set_once, store_host, world,
)
from fxcomp.compat.machine import (
    OUT_OF_MEMORY, forget_freed_memory, host_name, is_accelerator,
    machine_name, processor_name, processor_quota, processors, return_freed_memory, spare_bytes, synchronize,
    usable_processors,
)
from fxcomp.compat.modes import (
    attention_order, cpu_libraries, default_device, determinism, device_of_default, dispatch_mode,
    float32_precision, function_mode_in_backward, function_modes, generators_in, has_saved_tensor_hooks,
    is_inside_transform, is_profiling, is_same_generator, outside_function_modes, subclass_dispatch,
)
from fxcomp.compat.operators import (
    OBJECTS, bare_name, carries_objects, checks_values, communicates, direct_aten, draws, finished_work, flops,
    functional_operator, has_effect, has_flop_formula, has_results, is_bound_by_memory, is_functional_collective,
    is_higher_order, is_in_place, is_operator, is_pointwise, is_profiler, is_random, is_view, moves_tensors,
    multiplies_in_tf32, named_arguments, places_of_arguments, reduction, takes_lists, without_hidden_communication,
    written_arguments,
)
from fxcomp.compat.optimizers import (
    GradScaler, awaits_update, begin_in_step, count_as_stepped, global_module_hooks, held_bytes, is_alias, is_fake,
    is_sparse_view, is_subclass, is_uninitialized, is_without_memory, knows_values, mark_stepped, optimizer_hooks,
    scale_of, some_scaler_scales, strides, suggested_format, watch_optimizer,
)
from fxcomp.compat.source_lines import (
    is_asked_by_user, is_called_by_user, is_raised_as_eager, is_users_call, users_code_tells_kinds, users_level,
    users_line, users_source,
)
from fxcomp.compat.streams import (
    recorded, side_stream, stream_of, streams_of, to_device, wait_for_stream, works_later,
)
from fxcomp.compat.structured import is_traced, trace_artifact
from fxcomp.compat.symbols import (
    SPECIAL_SIZES, SYMBOLS, ShapeGuard, as_number, attributes_instead, bound_symbols, decided_symbols, decisions,
    has_symbols, hint, is_open, limit, live_number, noting_texts, shape_guard, size_hint, symbols, symbols_of_number,
    unbacked_symbols, unbound_symbols, without_locations,
)
from fxcomp.compat.tracing import (
    DATA_DEPENDENT, DispatchMode, Fake, FakeMode, fake_mode, fake_on, fake_with_dynamic_dims, forget_fakes,
    is_traced_here, onednn, plain_values, real_tensors, SIZE_DEPENDS, trace, trace_functional, uses_onednn,
    without_autocast,
)
