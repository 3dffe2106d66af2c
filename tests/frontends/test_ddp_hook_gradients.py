"""`fxcomp.ddp_hook` averages sparse and complex gradients as DistributedDataParallel does without a hook."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp

PASSES = 9
"""More than the dense ones before a plan."""


def words(pass_number: int, count: int = 6) -> Tensor:
    """Draw different rows on each rank, some of them twice."""
    torch.manual_seed(100 * pass_number + dist.get_rank())
    return torch.randint(0, 12, (count,))


class Mixed(nn.Module):
    """Sparse embeddings between dense layers, one of them first in backward."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Embedding(12, 8, sparse=True, dtype=dtype)
        self.inner = nn.Linear(8, 8, dtype=dtype)
        self.bag = nn.EmbeddingBag(12, 8, mode="sum", sparse=True, dtype=dtype)
        self.dense = nn.Embedding(12, 8, dtype=dtype)
        self.last = nn.Linear(8, 3, dtype=dtype)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.inner(self.first(rows)) + self.dense(rows)
        return self.last(hidden.sum(0) + self.bag(rows, rows.new_zeros(1))[0] + self.first(rows.flip(0)).sum(0))


class Scaled(nn.Module):
    """A sparse embedding in the middle of a submodule, whose weight another module has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"table": nn.Embedding(12, 4, sparse=True), "head": nn.Linear(4, 2)})
        self.twin = self.body["table"]

    def forward(self, rows: Tensor) -> Tensor:
        return self.body["head"](self.body["table"](rows) * self.twin(rows.flip(0)))


def tied() -> nn.Module:
    """A weight that a dense layer has first, so that DistributedDataParallel expects its gradient dense."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 12, bias=False)
            self.table = nn.Embedding(12, 4, sparse=True)
            self.table.weight = self.head.weight

        def forward(self, rows: Tensor) -> Tensor:
            return self.head(self.table(rows))

    return Tied()


SPARSE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "one sparse layer before a dense one": (
        lambda: nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Linear(4, 3)),
        {},
    ),
    "several among dense ones": (Mixed, {}),
    "small buckets": (Mixed, {"bucket_cap_mb": 1e-4}),
    "bf16": (lambda: nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Linear(4, 3)).bfloat16(), {}),
    "f64": (lambda: Mixed(torch.float64), {}),
    "a static graph": (Mixed, {"static_graph": True}),
    "views of buckets": (Mixed, {"gradient_as_bucket_view": True}),
    "unused parameters are looked for": (Mixed, {"find_unused_parameters": True}),
    "nothing dense": (lambda: nn.EmbeddingBag(12, 4, sparse=True), {}),
    "two modules share it": (Scaled, {}),
    "tied to a dense layer": (tied, {}),
    "frozen": (lambda: nn.Sequential(nn.Embedding(12, 4, sparse=True).requires_grad_(False), nn.Linear(4, 3)), {}),
}
"""Models with sparse embeddings, and options of the wrapper."""

INDEXES: dict[str, Callable[[int], Tensor]] = {
    "different rows": words,
    "different numbers of rows": lambda k: words(k, 3 + 4 * dist.get_rank()),
    "no rows on rank 0": lambda k: words(k, 5 * dist.get_rank()),
    "no rows on any rank": lambda k: words(k, 0),
    "the same row again and again": lambda _: torch.full((7,), dist.get_rank()),
    "no rows in some passes": lambda k: words(k, 6 * (k % 2)),
}


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [each.to_dense().clone() for each in found]


def trained(
    make: Callable[[], nn.Module],
    hook: fxcomp.DdpHook | None,
    rows: Callable[[int], Tensor] = words,
    *,
    micro: int = 1,
    **options: Any,
) -> tuple[list[list[Tensor]], list[bool]]:
    """Return the gradients of each pass, with the parameters at the end, and which gradients are sparse."""
    torch.manual_seed(5)
    model = make()
    ddp = DistributedDataParallel(model, **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    trainable = [p for p in model.parameters() if p.requires_grad]
    found: list[list[Tensor]] = []
    for number in range(PASSES):
        model.zero_grad()
        for part in range(micro):
            with ddp.no_sync() if part < micro - 1 else nullcontext():
                given = rows(number * micro + part)
                ddp(given.view(1, -1) if isinstance(model, nn.EmbeddingBag) else given).abs().square().sum().backward()
        found.append(gradients(model))
        with torch.no_grad():  # torch.optim has no step for sparse bf16
            for parameter, gradient in zip(trainable, found[-1], strict=True):
                parameter -= 1e-3 * gradient
    found.append([p.detach().clone() for p in model.parameters()])
    return found, [p.grad.is_sparse for p in model.parameters() if p.grad is not None]


def is_same(mine: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for some, others in zip(mine, theirs, strict=True) for a, b in zip(some, others, strict=True)
    )


def as_without(make: Callable[[], nn.Module], *given: Any, **options: Any) -> bool:
    """Return if gradients have the layout and the bits that they have without a hook."""
    hook = fxcomp.ddp_hook(compress="dense")
    mine, theirs = (trained(make, each, *given, **options) for each in (hook, None))
    hook.close()
    return mine[1] == theirs[1] and is_same(mine[0], theirs[0])


def averaged(make: Callable[[], nn.Module], rows: Callable[[int], Tensor], micro: int = 1) -> list[list[Tensor]]:
    """Train as `trained` without a wrapper: each rank's gradients over the number of ranks, added up in rank order.

    A wrapper without a hook may corrupt its memory where a rank has no rows.
    """
    torch.manual_seed(5)
    model = make()
    found: list[list[Tensor]] = []
    for number in range(PASSES):
        model.zero_grad()
        for part in range(micro):
            model(rows(number * micro + part)).abs().square().sum().backward()
        found.append([])
        for parameter, gradient in zip(model.parameters(), gradients(model), strict=True):
            mine = gradient / dist.get_world_size()
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine)
            found[-1].append(reduce(torch.add, everyone))
            with torch.no_grad():
                parameter -= 1e-3 * found[-1][-1]
    found.append([p.detach().clone() for p in model.parameters()])
    return found


def as_averaged(rows: Callable[[int], Tensor], micro: int = 1) -> bool:
    """Return if sparse gradients are sparse with a hook, and the mean over ranks."""
    hook = fxcomp.ddp_hook(compress="dense")
    mine, are_sparse = trained(Mixed, hook, rows, micro=micro)
    hook.close()
    theirs = averaged(Mixed, rows, micro)
    is_near = all(
        float((a - b).norm()) <= 1e-4 * float(b.norm()) + 1e-6
        for some, others in zip(mine, theirs, strict=True)
        for a, b in zip(some, others, strict=True)
    )
    return is_near and are_sparse == [True, False, False, True, False, False, False]


def sparse_models() -> dict[str, bool]:
    return {name: as_without(make, **options) for name, (make, options) in SPARSE.items()}


def sparse_indexes() -> dict[str, bool]:
    found = {name: as_averaged(rows) for name, rows in INDEXES.items()}
    return found | {"accumulated": as_averaged(words, micro=3)}


def test_sparse_gradients_are_those_of_a_wrapper_without_a_hook():
    for found in run_ranks(2, sparse_models):
        assert found == dict.fromkeys(SPARSE, True)


def test_any_number_of_indexes_is_averaged_on_two_ranks_and_on_three():
    for ranks in (2, 3):
        for found in run_ranks(ranks, sparse_indexes):
            assert found == dict.fromkeys((*INDEXES, "accumulated"), True)


def compressed(
    make: Callable[[], nn.Module], plan: str, batch: Callable[[int], Tensor]
) -> tuple[dict[str, Any], list[list[Tensor]]]:
    """Train with a compressed plan; return the bits that ranks must have alike, the hook's own words, and gradients."""
    hook = fxcomp.ddp_hook(compress=plan)
    found, _ = trained(make, hook, batch)
    digest = hashlib.sha256()
    for each in (each for some in found for each in some):
        digest.update((torch.view_as_real(each) if each.is_complex() else each).numpy().tobytes())
    assert hook.plan is not None
    planned = {name for bucket in hook.plan.buckets for name in bucket.names}
    norm, report = hook.metrics(residuals=True)["residual_norm"], hook.report()
    hook.close()
    return {"print": digest.hexdigest(), "planned": planned, "report": report, "norm": norm}, found


def sparse_beside_compressed() -> dict[str, Any]:
    return compressed(Mixed, "int4", words)[0]


def test_a_plan_compresses_the_dense_gradients_beside_sparse_ones():
    ranks = run_ranks(2, sparse_beside_compressed)
    assert len({found["print"] for found in ranks}) == 1
    for found in ranks:
        assert found["norm"] > 0
        assert "first.weight" not in found["planned"]
        assert "bag.weight" not in found["planned"]
        assert {"inner.weight", "dense.weight", "last.weight"} <= found["planned"]
        assert "the gradient of 'first.weight' is sparse (sparse=True): indices and values travel" in found["report"]


def alone() -> bool:
    return as_without(Mixed)


def test_one_rank_hands_sparse_gradients_back():
    assert run_ranks(1, alone) == [True]


# Complex numbers


class Phases(nn.Module):
    """Complex numbers of two widths and all shapes beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(6, 8, dtype=torch.complex64)
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self.turn = nn.Parameter(torch.tensor(1 + 1j))
        self.cube = nn.Parameter(torch.randn(2, 3, 8, dtype=torch.complex64))
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.table(inputs) * self.turn * self.wide.to(torch.complex64) + self.cube.sum((0, 1))
        return self.last(hidden.abs())


def signals(pass_number: int) -> Tensor:
    torch.manual_seed(100 * pass_number + dist.get_rank())
    return torch.randn(4, 6, dtype=torch.complex64)


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype)


class Turned(nn.Module):
    """A parameter that lies column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, dtype=torch.complex64).t())

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


COMPLEX: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "complex64": (lambda: nn.Linear(6, 3, dtype=torch.complex64), {}),
    "complex128": (lambda: nn.Sequential(Cast(torch.complex128), nn.Linear(6, 3, dtype=torch.complex128)), {}),
    "mixed": (Phases, {}),
    "small buckets": (Phases, {"bucket_cap_mb": 1e-4}),
    "a static graph": (Phases, {"static_graph": True}),
    "views of buckets": (Phases, {"gradient_as_bucket_view": True}),
    "unused parameters are looked for": (Phases, {"find_unused_parameters": True}),
    "transposed": (Turned, {}),
}


def complex_models() -> dict[str, bool]:
    return {name: as_without(make, signals, **options) for name, (make, options) in COMPLEX.items()}


def test_complex_gradients_are_those_of_a_wrapper_without_a_hook():
    for found in run_ranks(2, complex_models):
        assert found == dict.fromkeys(COMPLEX, True)


COMPRESSED = ("int4", "topk(0.25)", "powersgd(2)", "sign", "sidco(0.25)")
"""Plans with error feedback, by a compressor's name."""


def errors_of_complex(plan: str) -> tuple[str, float, float]:
    """Return the bits, the norm of residuals, and the error of all gradients together relative to dense ones."""
    found, gradients_of_plan = compressed(Phases, plan, signals)
    dense, _ = trained(Phases, None, signals)
    sums = [
        [torch.stack([gradients[k] for gradients in some[:-1]]).sum(0) for k in range(len(some[0]))]
        for some in (gradients_of_plan, dense)
    ]
    error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*sums, strict=True))
    return found["print"], found["norm"], error


def complex_by_plans() -> dict[str, tuple[str, float, float]]:
    return {plan: errors_of_complex(plan) for plan in COMPRESSED}


def test_complex_gradients_are_compressed_with_error_feedback_and_replicas_stay_alike():
    one, other = run_ranks(2, complex_by_plans)
    assert one.keys() == set(COMPRESSED)
    for plan, (bits, norm, error) in one.items():
        assert bits == other[plan][0], plan
        assert norm > 0, plan
        assert error < 1, plan
