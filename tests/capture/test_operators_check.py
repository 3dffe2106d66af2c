"""An operator that looks at values and raises does so in a step, as in eager PyTorch, and the step goes on after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from helpers.ranks import try_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp.errors import CaptureFailed

linalg: Any = torch.linalg
EYE, ROWS, NAN = torch.eye(4), torch.ones(4, 4), torch.full((4, 4), float("nan"))
TABLE = torch.arange(12.0).view(4, 3)
INDEX, OUTSIDE, NEGATIVE = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 9]), torch.tensor([0, 1, -1])
FAR = torch.tensor([0, 1, 99])
ONES, CLASSES = torch.ones(3), TABLE[:3]
SHARES, NO_SHARES = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.1, -0.2, 0.3])
PARTS = torch.tensor([1, 0, 1])


class Case(NamedTuple):
    """A function of a tensor of the batch, one that it takes and one for which it raises."""

    compute: Callable[[Tensor], Any]
    good: Tensor
    bad: Tensor


def asserted(x: Tensor) -> Tensor:
    torch._assert_async((x > 0).all())
    return x


def asserted_with_text(x: Tensor) -> Tensor:
    torch._assert_async((x > 0).all(), "a share is negative")
    return x


def checked(k: Tensor) -> Tensor:
    torch._check(k.min().item() >= 0)
    return k


def claimed(k: Tensor) -> Tensor:
    torch._assert((k >= 0).all(), "negative")
    return k


def assigned(k: Tensor) -> Tensor:
    table = TABLE.clone()
    table[k] = 0.0
    return table


def padded(k: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(torch.ones(3, 3, 1), k).data


def of_matrices(bad: Tensor, *names: str) -> dict[str, Case]:
    return {name: Case(getattr(linalg, name), 2 * EYE, bad) for name in names}


def of_indices(bad: Tensor, **computes: Callable[[Tensor], Any]) -> dict[str, Case]:
    return {name: Case(compute, INDEX, bad) for name, compute in computes.items()}


CASES = {
    **of_matrices(0 * EYE, "inv", "lu_factor", "ldl_factor"),
    **of_matrices(-EYE, "cholesky"),
    **of_matrices(NAN, "eig", "eigh", "eigvalsh", "svd", "svdvals", "pinv", "matrix_rank"),
    "inv_ex": Case(lambda x: linalg.inv_ex(x, check_errors=True), EYE, 0 * EYE),
    "cholesky_ex": Case(lambda x: linalg.cholesky_ex(x, check_errors=True), EYE, -EYE),
    "lu_factor_ex": Case(lambda x: linalg.lu_factor_ex(x, check_errors=True), EYE, 0 * EYE),
    "ldl_factor_ex": Case(lambda x: linalg.ldl_factor_ex(x, check_errors=True), EYE, 0 * EYE),
    "solve": Case(lambda x: linalg.solve(x, ROWS), EYE, 0 * EYE),
    "solve_ex": Case(lambda x: linalg.solve_ex(x, ROWS, check_errors=True), EYE, 0 * EYE),
    "matrix_power": Case(lambda x: linalg.matrix_power(x, -1), EYE, 0 * EYE),
    "cholesky_inverse": Case(torch.cholesky_inverse, EYE, 0 * EYE),
    "lu_unpack": Case(lambda p: torch.lu_unpack(EYE.clone(), p), torch.arange(1, 5).int(), torch.arange(4, 8).int()),
    **of_indices(
        OUTSIDE,
        gather=lambda k: TABLE.gather(0, k.view(1, 3)),
        embedding=lambda k: F.embedding(k, TABLE),
        embedding_bag=lambda k: F.embedding_bag(k.view(1, 3), TABLE),
        index_select=lambda k: TABLE.index_select(0, k),
        index=lambda k: TABLE[k],
        index_put=lambda k: TABLE.index_put((k,), ONES),
        index_add=lambda k: TABLE.index_add(0, k, torch.ones(3, 3)),
        index_copy=lambda k: TABLE.index_copy(0, k, torch.ones(3, 3)),
        index_fill=lambda k: TABLE.index_fill(0, k, 1.0),
        index_reduce=lambda k: TABLE.index_reduce(0, k, torch.ones(3, 3), "mean"),
        scatter=lambda k: TABLE.scatter(0, k.view(1, 3), torch.ones(1, 3)),
        scatter_add=lambda k: TABLE.scatter_add(0, k.view(1, 3), torch.ones(1, 3)),
        scatter_reduce=lambda k: TABLE.scatter_reduce(0, k.view(1, 3), torch.ones(1, 3), "sum"),
        assigned=assigned,
        cross_entropy=lambda k: F.cross_entropy(CLASSES, k),
        nll_loss=lambda k: F.nll_loss(CLASSES, k),
        nll_loss_2d=lambda k: F.nll_loss(CLASSES.view(1, 3, 3, 1), k.view(1, 3, 1)),
        multi_margin_loss=lambda k: F.multi_margin_loss(CLASSES, k),
        multilabel_margin_loss=lambda k: F.multilabel_margin_loss(TABLE[0], k),
        one_hot=lambda k: F.one_hot(k, 3),
        searchsorted=lambda k: torch.searchsorted(ONES, ONES, sorter=k),
    ),
    **of_indices(FAR, take=TABLE.take, put=lambda k: TABLE.put(k, ONES)),
    **of_indices(
        FAR,
        max_unpool1d=lambda k: F.max_unpool1d(torch.ones(1, 1, 3), k.view(1, 1, 3), 2),
        max_unpool2d=lambda k: F.max_unpool2d(torch.ones(1, 1, 3, 1), k.view(1, 1, 3, 1), 2),
    ),
    **of_indices(
        NEGATIVE,
        one_hot_of_negative=lambda k: F.one_hot(k, 3),
        one_hot_of_any=F.one_hot,
        torch_check=checked,
        torch_assert=claimed,
        distribution=lambda k: torch.distributions.Categorical(ONES, validate_args=True).log_prob(k),
        bincount=lambda k: torch.bincount(k, minlength=5),
        repeat_interleave=lambda k: torch.repeat_interleave(ONES, k),
    ),
    "masked_scatter": Case(lambda k: torch.zeros(3).masked_scatter(k > 0, torch.ones(2)), PARTS, PARTS + 1),
    "segment_reduce": Case(lambda k: torch.segment_reduce(torch.ones(6), "sum", lengths=k), INDEX + 1, OUTSIDE),
    "pack_padded_sequence": Case(padded, torch.tensor([3, 2, 1]), torch.tensor([3, 2, 0])),
    "embedding_bag_offsets": Case(lambda k: F.embedding_bag(INDEX, TABLE, k), torch.tensor([0, 1]), PARTS[:2]),
    "ctc_loss": Case(
        lambda k: F.ctc_loss(torch.zeros(5, 1, 4), INDEX[None], k, 0 * k + 3), PARTS[:1] + 4, PARTS[:1] + 8
    ),
    "floor_divide": Case(lambda k: 6 // k, PARTS + 1, PARTS),
    "div": Case(lambda k: torch.div(INDEX, k, rounding_mode="trunc"), PARTS + 1, PARTS),
    "remainder": Case(lambda k: 6 % k, PARTS + 1, PARTS),
    "fmod": Case(lambda k: torch.fmod(INDEX, k), PARTS + 1, PARTS),
    "binary_cross_entropy": Case(lambda x: F.binary_cross_entropy(x, ONES), SHARES, SHARES + 1),
    "multinomial": Case(lambda x: torch.multinomial(x, 1), SHARES, NO_SHARES),
    "bernoulli": Case(torch.bernoulli, SHARES, NO_SHARES),
    "poisson": Case(torch.poisson, SHARES, NO_SHARES),
    "normal": Case(lambda x: torch.normal(0 * ONES, x), SHARES, NO_SHARES),
    "histc": Case(lambda x: torch.histc(x, 4), SHARES, SHARES / 0),
    "histogram": Case(lambda x: torch.histogram(x, 4), SHARES, SHARES / 0),
    "quantile": Case(lambda x: torch.quantile(ONES, x), SHARES, NO_SHARES),
    "nanquantile": Case(lambda x: ONES.nanquantile(q=x), SHARES, NO_SHARES),
    "assert_async": Case(asserted, SHARES, NO_SHARES),
    "assert_async_with_text": Case(asserted_with_text, SHARES, NO_SHARES),
}


def number_of(result: Any) -> Tensor:
    leaf = next(each for each in pytree.tree_leaves(tuple(result) if isinstance(result, tuple) else result))
    return (torch.view_as_real(leaf) if leaf.is_complex() else leaf).float().sum()


class Trained:
    """A small model and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def values(self) -> list[Tensor]:
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        return [value.detach().clone() for value in (*self.model.parameters(), *state) if value is not None]


@pytest.mark.parametrize(
    ("name", "is_used"),
    [
        pytest.param(name, is_used, id=f"{name}-{'used' if is_used else 'unused'}", marks=marks)
        for number, name in enumerate(CASES)
        for is_used in (True, False)
        for marks in [() if number % 6 == (0 if is_used else 3) or (is_used and number % 2) else [pytest.mark.slow]]
    ],
)
def test_a_step_raises_where_eager_does_and_goes_on(name: str, is_used: bool) -> None:
    case = CASES[name]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.dropout(model(batch[0]), 0.5).square().mean()
        checked = number_of(case.compute(batch[1]))
        return loss * (1 + 1e-3 * checked) if is_used else loss

    torch.manual_seed(0)
    ours = Trained(nn.Linear(3, 3))
    eager = Trained(copy.deepcopy(ours.model))
    x = torch.ones(2, 3)
    step = fxcomp.compile_step(ours.model, loss_fn, ours.optimizer, (x, case.good))

    def eagerly(batch: Any) -> None:
        eager.optimizer.zero_grad()
        loss_fn(eager.model, batch).backward()
        eager.optimizer.step()

    for number, checked in enumerate((case.bad, case.good, case.bad, case.good)):
        raised: list[type | None] = []
        for call, trained in ((eagerly, eager), (step, ours)):
            before = trained.values()
            torch.manual_seed(number)
            try:
                call((x, checked))
                raised.append(None)
            except (RuntimeError, IndexError, ValueError, AssertionError) as error:
                raised.append(type(error))
            except CaptureFailed as error:  # torch 2.11 looks at q by itself, so that another q is captured again
                said = str(error)
                assert "quantile" in name
                assert torch.__version__.startswith("2.11")
                assert "RuntimeError: quantile() q values must be in the range" in said
                raised.append(RuntimeError)
            if raised[-1] is not None:
                assert all(map(torch.equal, trained.values(), before)), f"what step {number} changed"
        assert raised[0] == raised[1], f"step {number}"
        assert (raised[0] is not None) == (checked is case.bad), f"step {number}"
        assert all(map(torch.equal, ours.values(), eager.values())), f"after step {number}"


def test_a_check_in_the_backward_pass_comes_before_every_update() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        x = batch[:1].requires_grad_()
        middle = model[0](x)
        middle.register_hook(lambda gradient: torch._assert_async((batch[1] > 0).all(), "negative") or gradient)
        return model[1](middle).sum()

    trained = Trained(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    step = fxcomp.compile_step(trained.model, loss_fn, trained.optimizer, torch.ones(2, 3))
    step(torch.ones(2, 3))
    before = trained.values()
    with pytest.raises(RuntimeError, match="negative"):
        step(-torch.ones(2, 3))
    assert all(map(torch.equal, trained.values(), before))


def _one_rank_gets_a_singular_matrix(rank_with_it: int) -> None:
    import torch.distributed as dist

    trained = Trained(nn.Linear(4, 4))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(linalg.inv(batch)).square().mean()

    step = fxcomp.compile_step(trained.model, loss_fn, trained.optimizer, EYE, compress="dense")
    step(EYE)
    step(0 * EYE if dist.get_rank() == rank_with_it else EYE)


def test_where_one_rank_raises_the_others_are_told_why() -> None:
    told, raised = try_ranks(2, _one_rank_gets_a_singular_matrix, 1)
    assert raised.error == "_LinAlgError", raised.text
    assert told.error == "PeerFailed", told.text
    assert "rank 1 raised _LinAlgError" in told.text or "LinAlgError" in told.text
