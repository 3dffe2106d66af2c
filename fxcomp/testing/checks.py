"""Check properties of every compressor. Checks raise AssertionError with the observed values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from fxcomp.compressors import CATALOGUE, Compressor, parse_compressor
from fxcomp.errors import FxcompError
from fxcomp.testing.draws import (
    errors_of_ranks_average_out,
    mean_is_unbiased,
    state_starts_as_it_should,
    streams_move_on,
)
from fxcomp.testing.kernel_checks import (
    kernels_give_the_bits_of_the_reference,
    kernels_give_the_bits_of_the_reference_at_round_lengths,
    kernels_give_the_bits_of_the_reference_on_five_million_values,
    ops_compute_the_same_and_change_nothing,
    reference_of,
    threads_change_no_bit,
    wrong_tensors_are_refused,
)
from fxcomp.testing.result_checks import (
    a_sum_that_is_not_finite_is_seen,
    bytes_are_all_that_travels,
    errors_telescope,
    every_rank_decodes_the_mean,
    feedback_is_stable,
    finite_values_leave_a_finite_residual,
    large_segments_come_out_whole,
    payload_and_residual_add_up,
    rounding_goes_either_way,
    segments_do_not_mix,
    the_next_step_is_finite_again,
    what_is_not_finite_is_seen_and_spares_the_residual,
)
from fxcomp.testing.samples import ROUND_SEGMENTS, gaussian, segments_to_try


def check_compressor(compressor: Compressor) -> None:
    """Run every check. Raise AssertionError with the name of the check."""
    for name, check in CHECKS.items():
        try:
            check(compressor)
        except (AssertionError, FxcompError) as error:
            raise AssertionError(f"{compressor}: {name.replace('_', ' ')}: {error}") from error


def declares_itself(compressor: Compressor) -> None:
    facts = compressor.facts
    for text in ("name", "summary", "payload", "use", "avoid", "source"):
        assert getattr(facts, text).strip(), f"facts.{text} is empty"
    known = {field.name for field in fields(compressor)}  # pyright: ignore[reportArgumentType]
    for parameter in facts.parameters:
        assert parameter.name in known, f"facts name the parameter {parameter.name!r}, which it does not have"
        assert parameter.choices or parameter.low <= parameter.high, f"{parameter.name} has an empty range"
    assert compressor == compressor.bound_to((), 1).bound_to((), 1) or facts.agreement is not None, (
        "bound_to changes a compressor that needs no binding"
    )
    assert hash(compressor) == hash(type(compressor)(*compressor.parameters)), "equal compressors hash differently"
    if CATALOGUE.get(facts.name) is type(compressor):
        assert parse_compressor(str(compressor)) == compressor, f"{compressor} does not parse back"
    assert compressor.has_state == (sum(map(compressor.state_elements, (7, 1000))) > 0), (
        "has_state and state_elements disagree"
    )


def payload_has_the_declared_size(compressor: Compressor) -> None:
    bound = compressor.bound_to((), 1)
    for segments in [*segments_to_try(compressor), ROUND_SEGMENTS]:
        new = reference_of(bound, gaussian(sum(segments)), None, segments)
        size = bound.payload_elements(segments)
        assert new.payload.dtype is bound.payload_dtype, (
            f"payload_dtype is {bound.payload_dtype}, not {new.payload.dtype}"
        )
        assert new.payload.shape == (size,), f"{segments}: {size} elements declared, {tuple(new.payload.shape)} made"
        assert bound.payload_bytes(segments) == new.payload.numel() * new.payload.element_size(), f"{segments}: bytes"
        if bound.payload_dtype is torch.uint8:
            assert size % 4 == 0, f"{segments}: gathered payloads of {size} bytes lose their alignment"
        if sum(segments) == 0:
            assert size == 0, f"{segments}: {size} elements for nothing"


CHECKS: dict[str, Callable[[Compressor], None]] = {
    check.__name__: check
    for check in (
        declares_itself,
        payload_has_the_declared_size,
        kernels_give_the_bits_of_the_reference,
        kernels_give_the_bits_of_the_reference_on_five_million_values,
        kernels_give_the_bits_of_the_reference_at_round_lengths,
        threads_change_no_bit,
        ops_compute_the_same_and_change_nothing,
        payload_and_residual_add_up,
        large_segments_come_out_whole,
        errors_telescope,
        feedback_is_stable,
        rounding_goes_either_way,
        mean_is_unbiased,
        errors_of_ranks_average_out,
        segments_do_not_mix,
        every_rank_decodes_the_mean,
        what_is_not_finite_is_seen_and_spares_the_residual,
        a_sum_that_is_not_finite_is_seen,
        finite_values_leave_a_finite_residual,
        the_next_step_is_finite_again,
        bytes_are_all_that_travels,
        state_starts_as_it_should,
        streams_move_on,
        wrong_tensors_are_refused,
    )
}
"""All checks, by name."""
