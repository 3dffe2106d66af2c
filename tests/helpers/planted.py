"""Bugs to plant in a process, by name, and the test of the suite that must notice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from fxcomp.capture import optimizer, watch
from fxcomp.cluster.topology import GroupTopology
from fxcomp.codegen import emit
from fxcomp.commands import diff
from fxcomp.compressors import TopK, kernels
from fxcomp.cost import collectives, timeline
from fxcomp.error_tables import table
from fxcomp.frontends import hook_plan
from fxcomp.frontends.no_sync import Averaging
from fxcomp.graph import happens_before
from fxcomp.graph.info import Role, info
from fxcomp.passes import assign_streams, bucket_gradients, canonicalize_sync
from fxcomp.passes.broadcast_buffers import broadcast_buffers
from fxcomp.passes.commit_if_finite import commit_if_finite
from fxcomp.passes.order_for_overlap import order_for_overlap
from fxcomp.plan import route
from fxcomp.plan.kinds import Stream
from fxcomp.plan.pins import Pins
from fxcomp.report import plan_diff, wire_arithmetic
from fxcomp.runtime import transport
from fxcomp.runtime.agree import Conversation
from fxcomp.runtime.arena import Slice
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import Groups
from fxcomp.search.losses import Losses
from fxcomp.search.pinned import NOTHING_PINNED, Pinned
from fxcomp.state import handover
from fxcomp.state.handover import Holding
from fxcomp.step.verify.update import UpdateCheck
from helpers.planting import caught_by, exchange, unchanged, wrap

# Passes


@caught_by("tests/passes/test_bucket_gradients.py::test_two_gradients_become_one_bucket")
def a_bucket_loses_its_last_gradient() -> None:
    gather = bucket_gradients._gather_bucket

    def gather_all_but_one(graph: Any, number: int, bucket: Any, local: Any, order: Any) -> None:
        gather(graph, number, bucket, local, order)
        last = bucket.names[-1]
        for node in graph.nodes:
            if info(node).role is Role.UNPACK and info(node).parameter == last:
                node.replace_all_uses_with(local[last], delete_user_cb=lambda user: info(user).role is Role.UPDATE)

    bucket_gradients._gather_bucket = gather_all_but_one


@caught_by("tests/passes/test_canonicalize_sync.py::test_the_users_sum_and_division_become_one_mean")
def a_mean_is_divided_once_more() -> None:
    canonicalize_sync._drop_division = lambda *_: None


@caught_by("tests/passes/test_assign_streams.py::test_offloaded_compression_runs_on_the_cpu")
def everything_runs_on_the_compute_stream() -> None:
    assign_streams._stream = lambda *_: Stream.COMPUTE


@caught_by("tests/graph/test_aside.py::test_backward_stands_still_for_no_collective")
def a_device_waits_between_two_stages() -> None:
    assign_streams._go_aside = lambda _: False


@caught_by("tests/passes/test_order_for_overlap.py::test_each_bucket_leaves_behind_its_last_gradient")
def collectives_keep_the_order_of_the_backward_pass() -> None:
    exchange(order_for_overlap, unchanged)


@caught_by("tests/passes/test_commit_if_finite.py::test_residuals_are_taken_back_and_means_looked_at")
def a_step_that_is_not_finite_is_committed() -> None:
    exchange(commit_if_finite, unchanged)


@caught_by(
    "tests/passes/test_broadcast_buffers.py::test_shared_buffers_are_broadcast_as_soon_as_their_values_are_known"
)
def buffers_stay_each_ranks_own() -> None:
    exchange(broadcast_buffers, unchanged)


# Graph, and the source that is emitted of it


@caught_by("tests/graph/test_happens_before.py::test_a_planted_race_is_found")
def races_are_not_looked_for() -> None:
    happens_before._unordered = lambda *_: iter(())


@caught_by("tests/codegen/test_emit.py::test_every_launch_is_awaited_and_no_value_is_used_after_it_is_deleted")
def a_value_is_deleted_before_its_last_use() -> None:
    """With the piece before the one that uses it last."""

    def dead_after(original: Any, gm: Any, pieces: Any, undoing: Any) -> dict[int, list[str]]:
        dead = original(gm, pieces, undoing)
        return {id(early): dead[id(late)] for early, late in pairwise(pieces) if id(late) in dead}

    wrap(emit, "_dead_after", dead_after)


@caught_by("tests/codegen/test_emit.py::test_updates_begin_behind_the_line_that_announces_them")
def updates_begin_unannounced() -> None:
    emit._before_update = lambda *_: []


# Plans


@caught_by("tests/plan/test_pins.py::test_the_last_pattern_that_matches_decides")
def the_first_pattern_that_matches_decides() -> None:
    Pins.rule_for = lambda self, name: next((rule for rule in self.rules if rule.matches(name)), None)


@caught_by("tests/plan/test_route.py::test_packing_divides_by_what_decoding_does_not")
def a_sum_of_ranks_is_taken_for_their_mean() -> None:
    wrap(route._Walk, "_scale", lambda self, scale: scale(self) * self.cluster.world_size)


# Search


@caught_by("tests/search/test_pinned.py::test_no_bucket_holds_gradients_of_two_pins_or_free_ones")
def a_pin_is_ignored() -> None:
    Pinned.of = lambda *_, **__: NOTHING_PINNED


@caught_by("tests/search/test_resolve.py::test_a_solution_keeps_the_budget_and_is_predicted_as_it_says")
def a_plan_may_lose_twice_the_limit() -> None:
    wrap(Losses, "errors", lambda self, errors, strategy: errors(self, strategy) / 2)


# Compressors


@caught_by("tests/compressors/test_conformance.py::test_conforms[int8-kernels_give_the_bits_of_the_reference]")
def a_kernel_in_cpp_flips_a_bit() -> None:
    def run(original: Any, name: str, *arguments: Any) -> int:
        result = original(name, *arguments)
        if name == "fxcomp_int8_encode":
            arguments[2][:1] ^= 1
        return result

    wrap(kernels, "run", run)


@caught_by("tests/compressors/test_conformance.py::test_conforms[topk(0.01)-kernels_give_the_bits_of_the_reference]")
def a_reference_forgets_what_it_leaves_out() -> None:
    def compress(self: TopK, original: Any, given: Any) -> Any:
        made = original(self, given)
        return made._replace(residual=None if made.residual is None else made.residual * 0)

    wrap(TopK, "compress_reference", compress)


@caught_by("tests/error_tables/test_table.py::test_an_error_that_rises_with_what_is_kept_is_raised_before_it")
def a_table_is_taken_as_it_is() -> None:
    table._legal = lambda rows: rows


# Frontends


@caught_by(
    "tests/frontends/test_hook_plan.py::test_a_vector_goes_with_the_matrix_beside_it_and_buckets_end_with_buffers"
)
def a_vector_stays_in_the_chosen_bucket() -> None:
    hook_plan._owner = lambda _, parts, number: parts[number].owner


@caught_by("tests/frontends/test_no_sync.py::test_the_forward_pass_decides")
def every_backward_pass_averages() -> None:
    Averaging.is_due = lambda _: True


# Commands and reports


@caught_by("tests/report/test_plan_diff.py::test_the_command_compares_saved_plans_and_reports")
def plans_that_differ_end_well() -> None:
    wrap(diff, "run", lambda run, arguments: 0 * run(arguments))


@caught_by("tests/report/test_plan_diff.py::test_gradients_that_travel_with_others_are_counted_and_not_those_that_stay")
def whom_a_gradient_travels_with_is_not_compared() -> None:
    plan_diff._partners = lambda _: {}


@caught_by(
    "tests/report/test_wire_arithmetic.py::test_a_bandwidth_is_named_at_which_compressed_and_dense_cost_the_same"
)
def the_break_even_bandwidth_is_a_ranks_instead_of_the_links() -> None:
    wire_arithmetic._link_per_rank = lambda *_: 1.0


# Runtime


@caught_by("tests/runtime/test_agree.py::test_different_facts_are_named_with_both_values")
def ranks_are_not_compared() -> None:
    Conversation.check_same = lambda *_: None


@caught_by("tests/runtime/test_runtime.py::test_a_result_is_taken_when_its_collective_has_ended")
def a_wait_is_skipped() -> None:
    transport.Flight.finish = lambda self: self.output


@caught_by("tests/runtime/test_runtime.py::test_packing_flattens_scales_and_keeps_its_buffer")
def a_bucket_is_packed_unscaled() -> None:
    wrap(Runtime, "pack", lambda self, pack, name, parameters, values, _: pack(self, name, parameters, values, 1.0))


@caught_by("tests/test_residuals.py::test_between_hosts_each_ranks_shard_balances")
def a_sum_between_hosts_stays_inside_the_host() -> None:
    def all_reduce(self: Groups, original: Any, value: Any, level: str, lane: str, how: str = "sum") -> Any:
        return original(self, value, "intra" if level == "inter" else level, lane, how)

    wrap(Groups, "start", lambda self, original, transfer: original(
        self, replace(transfer, level="intra" if transfer.level == "inter" else transfer.level)))  # fmt: skip
    wrap(Groups, "all_reduce", all_reduce)


def with_other_memory(change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Compress with what `change` makes of the residual and the state."""

    def compress(
        self: Runtime, original: Any, name: str, compressor: Any, bucket: Any, residual: Any, segments: Any, **more: Any
    ) -> Any:
        residual, state = change(residual, more.get("state"))
        return original(self, name, compressor, bucket, residual, segments, **{**more, "state": state})

    wrap(Runtime, "compress", compress)


@caught_by("tests/test_residuals.py::test_between_hosts_each_ranks_shard_balances")
def a_residual_is_not_added() -> None:
    with_other_memory(lambda residual, state: (residual if residual is None else residual.zero_(), state))


@caught_by("tests/test_residuals.py::test_between_hosts_each_ranks_shard_balances")
def a_residual_is_not_updated() -> None:
    with_other_memory(lambda residual, state: (residual if residual is None else residual.clone(), state))


@caught_by("tests/runtime/test_runtime.py::test_a_compressor_draws_anew_for_every_bucket")
def the_counter_of_random_draws_stands_still() -> None:
    with_other_memory(lambda residual, state: (residual, state if state is None else state.clone()))


# Costs


@caught_by("tests/cost/test_collective_formulas.py::test_four_ranks_take_what_is_worked_out_by_hand")
def a_latency_counts_once_instead_of_at_every_step() -> None:
    wrap(collectives, "counts", lambda counts, *given: (min(1.0, counts(*given)[0]), *counts(*given)[1:]))


@caught_by("tests/cost/test_collective_formulas.py::test_four_ranks_take_what_is_worked_out_by_hand")
def bandwidth_counts_bits_for_bytes() -> None:
    wrap(collectives, "time_us", lambda time_us, kind, ranks, size, *rest: time_us(kind, ranks, 8 * size, *rest))


@caught_by(
    "tests/cost/test_collective_formulas.py::test_ranks_of_a_host_share_its_link_between_hosts_but_a_flat_ring_does_not"
)
def groups_that_share_a_link_each_get_all_of_it() -> None:
    wrap(GroupTopology, "gb_per_s", lambda self, gb_per_s, pattern: gb_per_s(self, pattern) * self.siblings)


@caught_by("tests/cost/test_timeline.py::test_two_that_want_a_whole_processor_get_half_of_it")
def a_processor_serves_two_at_full_speed() -> None:
    timeline._shares = lambda _, limits, __: list(limits)


# Steps


@caught_by("tests/capture/test_optimizers.py::test_sgd_follows_its_schedules_with_every_option")
def a_learning_rate_stays_what_it_was_at_first() -> None:
    first: dict[int, dict[str, float]] = {}
    live = optimizer.live_numbers
    exchange(live, lambda group: {**live(group), **first.setdefault(id(group), live(group))})


@caught_by("tests/capture/test_step_guard.py::test_evaluation_mode_is_captured_apart_from_training_mode")
def a_change_of_training_mode_goes_unseen() -> None:
    watch._OF_EVERY_MODULE |= {"training"}


@caught_by("tests/step/test_verification.py::test_an_update_that_is_not_the_optimizers_is_named_and_undone")
def verification_skips_updates() -> None:
    UpdateCheck.rule = lambda _, __, run: run
    UpdateCheck.finish = lambda *_, **__: None


@caught_by("tests/state/test_handover.py::test_three_ranks_that_become_two_owe_what_they_owed")
def a_hand_over_forgets_one_of_two_holdings() -> None:
    wrap(Holding, "add_to", lambda self, add_to, name, mean: add_to(
        replace(self, slices={n: held[:1] for n, held in self.slices.items()}), name, mean))  # fmt: skip


def with_other_weights(change: Callable[[Holding, Slice], Slice | None]) -> None:
    """Hand over what `change` makes of each slice, where it makes something."""

    def add_to(self: Holding, original: Any, name: str, mean: Any) -> None:
        changed = {n: [c for s in held if (c := change(self, s)) is not None] for n, held in self.slices.items()}
        original(replace(self, slices=changed), name, mean)

    wrap(Holding, "add_to", add_to)


@caught_by("tests/state/test_handover.py::test_the_owners_residual_moves_to_all_ranks_as_the_mean")
def an_owners_residual_counts_as_a_workers() -> None:
    with_other_weights(lambda held, s: replace(s, weight=s.weight / held.ranks) if s.slot else s)


@caught_by("tests/state/test_handover.py::test_the_owners_residual_moves_to_all_ranks_as_the_mean")
def an_owners_residual_is_dropped() -> None:
    with_other_weights(lambda _, s: None if s.slot else s)


@caught_by("tests/state/test_handover.py::test_ranks_that_compress_the_same_sum_go_on_with_the_same_residual")
def ranks_that_share_a_sum_go_on_with_residuals_of_their_own() -> None:
    wrap(Slice, "lies_like", lambda self, lies_like, other: lies_like(self, replace(other, place=self.place)))


@caught_by("tests/state/test_handover.py::test_three_ranks_that_become_two_owe_what_they_owed")
def the_sum_of_residuals_is_kept_instead_of_their_mean() -> None:
    keep_mean = handover.hand_over

    def keep_sum(holding: Holding, into: Any, sizes: Any, sharing: handover.Sharing, *what: str) -> Any:
        ratio = Fraction(holding.ranks, sharing.peers.world_size)
        scaled = {n: [replace(s, weight=s.weight * ratio) for s in held] for n, held in holding.slices.items()}
        return keep_mean(replace(holding, slices=scaled), into, sizes, sharing, *what)

    exchange(keep_mean, keep_sum)


@caught_by("tests/step/test_feedback_commit.py::test_one_rank_alone_leaves_such_a_step_out_too")
def whatever_arrives_counts_as_finite() -> None:
    Runtime.all_finite = lambda *_: True
