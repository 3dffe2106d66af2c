"""Provoke each refusal of capture/, frontends/ and checkpoints, follow its advice, and train as in eager PyTorch.

Refusals that need several ranks, or a library, have tests of their own, which are named here.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from helpers.advised import Row
from helpers.refused_losses import BATCHES, LOSSES, MODELS
from helpers.refused_optimizers import GUARDS, OPTIMIZERS
from helpers.refused_options import OPTIONS_ROWS

import fxcomp
from fxcomp.errors import FxcompError

SOURCE, TESTS = Path(fxcomp.__file__).parent, Path(__file__).parent.parent

TABLES = (MODELS, BATCHES, LOSSES, OPTIMIZERS, GUARDS, OPTIONS_ROWS)

ROWS: dict[str, Row] = {name: row for table in TABLES for name, row in table.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.one_in(3)
def test_a_refusal_says_what_to_do_and_that_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    row = ROWS[name]
    with pytest.raises(FxcompError) as caught:
        row.provoke()
    assert row.text in str(caught.value)
    assert place_of(row) in raised_at(caught.value)
    if row.follow is not None:
        row.follow()


def place_of(row: Row) -> str:
    (at,) = {place.at for place in places() if row.text in place.text} if not row.at else {row.at}
    return at


def raised_at(error: BaseException) -> list[str]:
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [code for code in codes if Path(code.co_filename).is_relative_to(SOURCE)]
    return [
        f"{Path(code.co_filename).relative_to(SOURCE)}::{_scope(code.co_filename, code.co_firstlineno)}" for code in own
    ]


def _scope(file: str, line: int) -> str:
    """Name a function as `places` does; Python 3.10's code objects have no qualified name."""
    found = [scope for scope, node in functions(ast.parse(Path(file).read_text())) if begins(node) == line]
    return found[0] if found else ""


def begins(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            scope = f"{outer}.{child.name}".removeprefix(".")
            if isinstance(child, ast.FunctionDef):
                yield scope, child
            yield from functions(child, scope)
        else:
            yield from functions(child, outer)


@dataclass(frozen=True)
class Place:
    at: str
    text: str
    """The words of the error that stand in the source where it is raised."""


@cache
def places() -> list[Place]:
    """List the places in capture/, frontends/ and state/checkpoint.py that raise an error of fxcomp's."""
    found: list[Place] = []
    paths = sorted(path for part in ("capture", "frontends") for path in (SOURCE / part).rglob("*.py"))
    for path in (*paths, SOURCE / "state" / "checkpoint.py"):
        for scope, node in functions(ast.parse(path.read_text())):
            for each in _raised(node):
                words = [n.value for n in ast.walk(each) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                found.append(Place(f"{path.relative_to(SOURCE)}::{scope}", "".join(words)))
    return found


def _raised(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """List the errors that a function raises by itself, and not in one inside of it."""
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop(0)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _is_ours(node.exc.func):
            yield node.exc
        stack.extend(ast.iter_child_nodes(node))


def _is_ours(raised: ast.expr) -> bool:
    name = raised.attr if isinstance(raised, ast.Attribute) else getattr(raised, "id", "")
    return name in ("refused", "_replaced") or (
        isinstance(kind := getattr(fxcomp.errors, name, None), type) and issubclass(kind, FxcompError)
    )


AVERAGED = "frontends/test_average_replicas.py::test_what_cannot_be_averaged_is_refused_with_what_to_do"
SCATTERED = "frontends/test_compress_reduce_scatter.py::test_what_cannot_be_scattered_is_refused_with_what_to_do"
WATCHED = "frontends/test_compile_model.py::test_a_gradient_that_no_rank_averages_raises_on_every_rank"
BACKEND = "frontends/test_torch_compile_refusals.py::test_every_rank_says_what_is_wrong"
COLLECTIVES = "capture/test_user_collectives.py::test_what_cannot_be_repeated_is_refused_by_name_on_all_ranks"

ELSEWHERE: dict[tuple[str, str], str] = {
    ("capture/faithful.py::explaining", "does not trace into one graph"): (
        "capture/test_untraceable.py::test_a_refusal_names_the_line_the_value_and_a_way_out"
    ),
    ("capture/faithful.py::_methods_refused.refusing.run", ""): (
        "capture/test_memory_doors.py::test_memory_is_not_handed_out"
    ),
    ("capture/faithful.py::_methods_refused.scaled", "scales the loss by a GradScaler"): (
        "frontends/test_advised.py::test_a_loss_that_is_scaled_by_hand_is_refused_and_scaler_takes_the_scaler"
    ),
    ("capture/forward_backward.py::_check_is_all_trained", "is not the model's"): (
        "frontends/test_advised.py::test_a_gan_trains_with_its_discriminator_frozen_in_the_generators_step"
    ),
    ("capture/step_capture.py::SharedBuffers.mark", "was not on any rank"): (
        "capture/test_buffers.py::test_a_large_buffer_that_nobody_was_seen_to_write_is_refused_by_name"
    ),
    ("capture/step_capture.py::check_parameters_are_read", "would write values of its own batch"): (
        "capture/test_buffers.py"
        "::test_a_forward_pass_that_writes_parameters_is_refused_on_several_ranks_which_would_drift_apart"
    ),
    ("capture/training.py::_check_weights", "computes a weight and stores it"): (
        "frontends/test_advised.py::test_a_weight_that_a_hook_computes_is_refused_and_its_parametrization_trains"
    ),
    ("capture/user_collectives.py::_explaining_no_group", "is not initialised in this process"): (
        "capture/test_user_collectives.py::test_a_loss_that_needs_a_process_group_says_so_where_there_is_none"
    ),
    ("capture/user_collectives.py::_check_batch_norm", "is a SyncBatchNorm"): COLLECTIVES,
    ("capture/user_collectives.py::_refuse", "which a compiled step cannot repeat"): COLLECTIVES,
    ("frontends/average_replicas.py::_averaged_modules", "hold different shards"): AVERAGED,
    ("frontends/average_replicas.py::_check_all_are_sharded", "is trained and not sharded"): AVERAGED,
    ("frontends/average_replicas.py::ReplicaAverage._of_this_shard", "this state is of"): (
        "frontends/test_average_replicas.py"
        "::test_a_compressed_outer_average_sends_shards_once_and_keeps_replicas_the_same"
    ),
    ("capture/training.py::_check_is_bare", "of torch.jit"): (
        "capture/test_set_up_by_first_forward.py::test_a_module_of_torch_jit_is_refused_by_name"
    ),
    ("frontends/compiled_model.py::CompiledModel._check_equal", "differs between ranks"): WATCHED,
    ("frontends/ddp_hook.py::DdpHook._started", "python_reducer"): (
        "frontends/test_ddp_hook_copies.py::test_single_gradients_of_torchs_python_reducer_are_refused_by_name"
    ),
    ("frontends/ddp_hook.py::DdpHook._started", "this hook is a copy of a hook with scaler="): (
        "frontends/test_ddp_hook_copies.py::test_a_copy_of_a_hook_with_a_scaler_is_refused_and_its_state_is_not"
    ),
    ("frontends/ddp_hook.py::states_of_files.states", "cannot be used: "): (
        "frontends/test_files_of_ranks.py::test_a_damaged_file_is_refused_by_name_on_every_rank"
    ),
    ("frontends/hook_program.py::Wrapped.bucket", "serves another model already"): (
        "frontends/test_ddp_hook.py::test_a_hook_serves_one_model"
    ),
    ("frontends/lightning.py::FxcompStrategy.__init__", "registers a hook of its own"): (
        "recipes/test_lightning.py::test_a_strategy_is_of_the_library_that_the_script_imports"
    ),
    ("frontends/planned_average.py::PlannedAverage.report", "there is no plan yet"): SCATTERED,
    ("state/checkpoint.py::_state", "is not whole"): (
        "state/test_checkpoint.py::test_a_checkpoint_with_something_missing_is_refused"
    ),
    ("state/checkpoint.py::read_checkpoint", "cannot be used"): (
        "state/test_checkpoint.py::test_a_damaged_folder_is_refused_and_an_earlier_one_offered"
    ),
    ("state/checkpoint.py::read_checkpoint", "holds no state of a step"): (
        "state/test_checkpoint.py::test_a_folder_without_a_whole_checkpoint_is_refused"
    ),
    ("frontends/scatter_job.py::ScatterJob._compress", "scatters with a divisor"): SCATTERED,
    ("frontends/sharded_modules.py::_check_is_scattered", "by another custom collective"): SCATTERED,
    ("frontends/scatter_plan.py::told_plan", "the plan has no bucket of"): SCATTERED,
    ("frontends/shard_feed.py::ShardFeed._check", "got no gradient in this backward pass"): AVERAGED,
    ("frontends/shard_feed.py::ShardFeed._check", "that runs when its gradient is there"): AVERAGED,
    ("frontends/sharded_modules.py::checked_modules", "has found nothing that is sharded"): AVERAGED,
    ("frontends/sharded_modules.py::_check", "over a mesh of two dimensions"): AVERAGED,
    ("frontends/sharded_modules.py::_check", "has no values yet"): AVERAGED,
    ("frontends/sharded_modules.py::_check", "has no elements"): (
        "frontends/test_unusual_parameters.py"
        "::test_an_empty_parameter_under_fully_shard_is_refused_by_name_and_trains_once_it_is_frozen"
    ),
    ("frontends/torch_compile.py::compile_model", "compile_model takes a torch.nn.Module"): (
        "frontends/test_compile_model.py::test_wrong_arguments_are_refused_at_the_call"
    ),
    ("frontends/torch_compile.py::_refuse_scripts", "of torch.jit"): (
        "frontends/test_compile_model.py::test_modules_of_torch_jit_are_refused_at_the_call"
    ),
    ("frontends/torch_compile.py::_refuse_suppressed_errors", "suppress_errors is on"): (
        "frontends/test_compile_model.py::test_suppressed_errors_are_refused_at_the_call"
    ),
    ("frontends/torch_compile.py::_check_same_options", "with other options before"): WATCHED,
    ("frontends/torch_compile.py::_refuse_ddp", "is wrapped in DistributedDataParallel"): BACKEND,
    ("frontends/torch_compile.py::compiled_model", "has no compiled backward pass yet"): BACKEND,
    ("frontends/torch_compile.py::_refuse_behind_break", "never reaches a collective"): BACKEND,
    ("frontends/torch_compile.py::_check_same_elements", "was resized or cast"): BACKEND,
    ("frontends/torch_compile.py::_check_thawed", "a second graph has other trainable"): BACKEND,
    ("frontends/torch_compile.py::_check_same_start", "starts with other values"): BACKEND,
    ("capture/faithful.py::explaining", "is given a PackedSequence"): (
        "frontends/test_advised.py::test_packed_sequences_are_refused_and_padded_ones_train_alike"
    ),
}
"""Tests of refusals that need several ranks or a library, and of those with a file of their own."""

OPEN: tuple[tuple[str, str], ...] = (
    ("capture/backward_graph.py::label_backward", "two inputs of the graph share memory"),
    ("capture/backward_graph.py::_keep_exchanges", "is reduced over"),
    ("capture/backward_graph.py::_check_operators", "which is not a plain operator"),
    ("capture/updates.py::check_update", "that its trace does not"),
    ("capture/whole_step.py::_capture", "it is captured for each size alone"),
    ("capture/whole_step.py::_check_symbols", "treats sizes that are symbols"),
    ("frontends/hook_job.py::HookJob._take", "came again where bucket"),
    ("frontends/hook_job.py::HookJob._feed", "has changed its buckets"),
    ("frontends/sharded_modules.py::_check_is_scattered", "is cut along another dimension"),
    ("frontends/shard_feed.py::ShardFeed._check", "reduced its gradients twice"),
    ("frontends/shard_feed.py::ShardFeed._check", "fully_shard reduces gradients as"),
    ("frontends/sharded_modules.py::checked_modules", "sharded over different ranks"),
    ("frontends/torch_compile.py::_for_one_model.checked", "is another object than when"),
    ("frontends/torch_compile.py::_first_graph", "the model lies on"),
)
"""Refusals that no test provokes by these words: wrappers in states that the tests' ranks do not reach, and two that
make a capture for each size and are never shown."""


FEW = 8
"""Fewer words in the source are a frame around a text that a function makes."""


def covers(at: str, text: str, place: Place) -> bool:
    """Ask if a row or a test is of a place. Where few words stand in the source, the rest is made elsewhere."""
    return at == place.at and (text in place.text or len(place.text.split()) < FEW)


def test_every_refusal_of_the_source_has_a_row_or_a_test():
    claims = [(place_of(row), row.text) for row in ROWS.values()] + [*ELSEWHERE, *OPEN]
    missing = [place for place in places() if not any(covers(*claim, place) for claim in claims)]
    assert not missing, "\n".join(f"{place.at}  {place.text[:90]!r}" for place in missing)


@pytest.mark.parametrize(("place", "test"), ELSEWHERE.items())
def test_a_refusal_that_is_tested_elsewhere_is_there(place: tuple[str, str], test: str):
    assert any(covers(*place, each) for each in places())
    file, _, name = test.partition("::")
    defined = [node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in defined


def test_at_least_sixty_refusals_are_followed():
    assert len(ROWS) == sum(map(len, TABLES)), "two rows of one name"
    assert sum(row.follow is not None for row in ROWS.values()) >= 60
