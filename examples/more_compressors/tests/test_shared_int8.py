"""Ranks that agree on scales, simulated in one process: codes that are summed on the wire, and no overflow."""

from collections.abc import Sequence

import pytest
import torch
from fxcomp_more import SharedInt8
from torch import Tensor

from fxcomp.compressors import Bias, Feedback, parse_compressor
from fxcomp.errors import BadOption
from fxcomp.testing.samples import gaussian


def _shared(ranks: int, block: int = 512, stochastic: bool = True) -> SharedInt8:
    return SharedInt8(block, stochastic).bound_to([], ranks)


def _states(compressor: SharedInt8, segments: Sequence[int], rank: int) -> Tensor | None:
    if not compressor.has_state:
        return None
    return torch.cat([torch.empty(0, dtype=torch.int64)] + [compressor.fresh_state(n, 3, rank) for n in segments])


def _agree(compressor: SharedInt8, values: list[Tensor], segments: Sequence[int]) -> Tensor:
    proposals = []
    for value in values:
        proposals.append(torch.full((compressor.proposal_elements(segments),), 77.0))
        compressor.propose(value, None, segments, None, proposals[-1])
    return torch.stack(proposals).amax(dim=0)


def _exchange(
    compressor: SharedInt8,
    gradients: list[Tensor],
    residuals: list[Tensor] | None,
    segments: Sequence[int],
    states: list[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of all ranks: the decoded mean and the summed codes."""
    ranks = len(gradients)
    states = states or [_states(compressor, segments, rank) for rank in range(ranks)]
    buckets = [gradient * (1.0 / ranks) for gradient in gradients]
    kept = residuals or [None] * ranks
    values = [bucket if residual is None else bucket + residual for bucket, residual in zip(buckets, kept, strict=True)]
    agreed = _agree(compressor, values, segments)
    total = torch.zeros(sum(segments), dtype=torch.int8)
    for bucket, residual, state in zip(buckets, kept, states, strict=True):
        payload = torch.full((sum(segments),), 77, dtype=torch.int8)
        compressor.encode(bucket, residual, payload, segments, state, agreed)
        assert (payload.int() + total.int()).abs().max() <= 127
        total += payload
    out = torch.full((sum(segments),), 77.0)
    compressor.decode(total, 1, segments, out, agreed)
    return out, total


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 63, 127])
def test_the_sum_of_the_codes_never_overflows_and_is_the_mean(ranks: int) -> None:
    """All ranks have the same largest value: the worst case for the sum."""
    segments = (4096,)
    gradients = [gaussian(4096, seed=rank).clamp(-2, 2) for rank in range(ranks)]
    for gradient in gradients:
        gradient[5], gradient[6] = 2.0, -2.0
    compressor = _shared(ranks)
    mean, codes = _exchange(compressor, gradients, None, segments)
    assert codes[5] == ranks * compressor.levels
    assert codes[6] == -ranks * compressor.levels
    exact = torch.stack(gradients).mean(dim=0)
    step = 2.0 / ranks / compressor.levels
    assert (mean - exact).abs().max() <= ranks * step
    assert (mean - exact).square().mean().sqrt() < 0.5 * step * ranks**0.5


@pytest.mark.parametrize("ranks", [1, 4, 16])
@pytest.mark.parametrize(("stochastic", "factor"), [(True, 1.9), (False, 0.95)])
def test_a_rank_loses_as_much_as_the_docstring_says(ranks: int, stochastic: bool, factor: float) -> None:
    values, segments = gaussian(131_072), (131_072,)
    compressor = _shared(ranks, stochastic=stochastic)
    agreed, payload, out = (
        _agree(compressor, [values], segments),
        torch.empty(131_072, dtype=torch.int8),
        values.clone(),
    )
    compressor.encode(values, None, payload, segments, _states(compressor, segments, 0), agreed)
    compressor.decode(payload, 1, segments, out, agreed)
    left_out = ((values - out).square().sum() / values.square().sum()).item()
    assert left_out == pytest.approx(factor / compressor.levels**2, rel=0.15)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_on_one_rank_is_seen_by_all(value: float) -> None:
    compressor, segments = _shared(2), (1000, 700)
    gradients = [gaussian(1700, seed=rank) for rank in range(2)]
    gradients[1][600] = value
    residuals = [0.1 * gaussian(1700, seed=7 + rank) for rank in range(2)]
    old = [residual.clone() for residual in residuals]
    mean, codes = _exchange(compressor, gradients, residuals, segments)
    is_spoilt = torch.zeros(1700, dtype=torch.bool)
    is_spoilt[512:1000] = True
    assert torch.equal(mean.isnan(), is_spoilt)
    assert not codes[is_spoilt].any()
    for residual, before in zip(residuals, old, strict=True):
        assert torch.equal(residual[is_spoilt], before[is_spoilt])
        assert not torch.equal(residual[~is_spoilt], before[~is_spoilt])


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("ranks", [4, 40])
def test_sent_and_left_telescope_over_all_ranks(ranks: int, stochastic: bool) -> None:
    segments = (1000, 24)
    compressor = _shared(ranks, 64, stochastic)
    residuals = [torch.zeros(1024) for _ in range(ranks)]
    states = [_states(compressor, segments, rank) for rank in range(ranks)]
    sent, put_in = torch.zeros(1024, dtype=torch.float64), torch.zeros(1024, dtype=torch.float64)
    for step in range(20):
        gradients = [gaussian(1024, seed=1000 * step + rank) for rank in range(ranks)]
        sent += _exchange(compressor, gradients, residuals, segments, states)[0]
        put_in += torch.stack(gradients).double().mean(dim=0)
        largest = max(residual.abs().max().item() for residual in residuals)
        assert largest <= 5.0 / ranks / max(compressor.levels - 1, 1)
    left = torch.stack(residuals).double().sum(dim=0)
    assert (sent + left - put_in).norm() < 2e-6 * put_in.norm()


def test_more_ranks_than_levels_are_refused() -> None:
    with pytest.raises(BadOption) as caught:
        SharedInt8().bound_to([(10,)], 128)
    assert str(caught.value) == (
        "shared_int8 cannot sum the codes of 128 ranks in eight bits: each needs at least one level on either side, so "
        "there may be 127 ranks.\n  Use int8, whose payloads are gathered, or bf16."
    )


def test_few_levels_need_error_feedback_and_one_level_must_not_have_it() -> None:
    feedback = [_shared(ranks).feedback for ranks in (1, 18, 19, 63, 64, 127)]
    assert feedback == [
        *(Feedback.OPTIONAL, Feedback.OPTIONAL, Feedback.REQUIRED),
        *(Feedback.REQUIRED, Feedback.FORBIDDEN, Feedback.FORBIDDEN),
    ]
    nearest = _shared(64, stochastic=False)
    assert nearest.feedback is Feedback.REQUIRED
    assert (nearest.bias, SharedInt8().bias) == (Bias.ROUNDING, Bias.UNBIASED)
    assert (nearest.has_state, nearest.state_bytes((5, 6)), SharedInt8().state_bytes((5, 6))) == (False, 0, 32)


def test_the_text_has_the_declared_parameters_and_no_others() -> None:
    assert str(_shared(4)) == "shared_int8"
    assert parse_compressor("shared_int8(64, stochastic=false)") == SharedInt8(64, stochastic=False)
    assert str(SharedInt8(64, stochastic=False)) == "shared_int8(block=64, stochastic=false)"
    with pytest.raises(BadOption, match="it is shared_int8\\(block: int = 512, stochastic: bool = true\\)"):
        parse_compressor("shared_int8(levels=4)")


def test_sizes_are_the_formulas() -> None:
    compressor = _shared(8)
    assert compressor.payload_bytes((1000, 7)) == 1007
    assert compressor.proposal_bytes((1000, 7, 0)) == 4 * 3
