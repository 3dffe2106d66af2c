"""One graph holds the whole step, and what may change between steps stays an input of it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from helpers.captures import captured
from helpers.eager import sgd, trains_as_eager
from helpers.jobs import JOBS, mlp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear

from fxcomp import compat
from fxcomp.capture.batch_type import batch_type
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.compat.constants import Constants
from fxcomp.graph.captured import Captured
from fxcomp.graph.edit import gradients
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.ops import ALL_REDUCE
from fxcomp.passes.canonicalize_sync import canonicalize_sync

SINCE_2_13 = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="unflatten makes numbers of sizes, which attention does to its lengths"
)


def inputs(step: Captured, kind: InputKind) -> list[str]:
    sources = [info(n).source for n in step.graph.graph.nodes if n.op == "placeholder"]
    return [str(s).partition(" ")[2] for s in sources if s is not None and s.kind is kind]


def roles(step: Captured) -> list[Role]:
    return [info(n).role for n in step.graph.graph.nodes if n.op == "call_function"]


def test_inputs_say_what_they_stand_for():
    step = captured(mlp(), JOBS["mlp"].batch(0), "adamw")
    assert inputs(step, InputKind.PARAMETER) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {"0.weight.step", "0.weight.exp_avg", "0.weight.exp_avg_sq"} <= set(inputs(step, InputKind.STATE))
    assert inputs(step, InputKind.HYPER) == ["0.lr", "0.weight_decay", "0.betas_0", "0.betas_1"]
    assert inputs(step, InputKind.BATCH) == ["0", "1"]


def test_gradients_are_labelled_in_the_order_in_which_backward_makes_them():
    step = captured(mlp(), JOBS["mlp"].batch(0))
    ready = list(gradients(step.graph))
    assert sorted(ready) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert {ready[0], ready[1]} == {"2.bias", "2.weight"}
    assert set(step.gradient_names) == set(ready)


def test_updates_come_behind_all_compute_and_belong_to_their_parameter():
    step = captured(JOBS["transformer"].build(), JOBS["transformer"].batch(0), max_grad_norm=1.0)
    found = roles(step)
    assert found.index(Role.UPDATE) > max(i for i, role in enumerate(found) if role in (Role.COMPUTE, Role.GRADIENT))
    assert Role.CLIP in found
    updates = [n for n in step.graph.graph.nodes if info(n).role is Role.UPDATE]
    assert {info(n).parameter for n in updates} == set(step.gradient_names)


def test_tied_weights_have_one_gradient():
    step = captured(JOBS["transformer"].build(), JOBS["transformer"].batch(0))
    assert "embed.weight" in step.gradient_names
    assert "head.weight" not in step.gradient_names
    assert inputs(step, InputKind.PARAMETER).count("embed.weight") == 1


def test_capturing_changes_nothing_of_the_users():
    model = JOBS["conv"].build()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    captured(model, JOBS["conv"].batch(0))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_are_inputs_and_get_no_update():
    model = mlp()
    model[0].requires_grad_(False)
    step = captured(model, JOBS["mlp"].batch(0))
    assert set(step.gradient_names) == {"2.weight", "2.bias"}
    assert "0.weight" in inputs(step, InputKind.PARAMETER)


@pytest.mark.parametrize(("name", "dimension"), [("mlp", 0), pytest.param("transformer", 1, marks=SINCE_2_13)])
def test_symbolic_sizes_are_guarded_by_what_tracing_assumed(name: str, dimension: int):
    job = JOBS[name]
    varying = frozenset([dimension])
    guard = captured(job.build(), job.batch(0, length=5), varying={0: varying, 1: varying}).guard
    assert guard is not None
    fits = [guard(list(job.batch(1, length=length))) for length in (5, 6, 30, 2, 1)]
    assert fits == [True, True, True, True, False]
    uneven = [job.batch(1, length=5)[0], job.batch(1, length=6)[1]]
    assert not guard(uneven)


def test_a_capture_frees_the_symbols_of_one_that_is_gone():
    job, varying = JOBS["mlp"], frozenset([0])

    def symbols_of_a_capture() -> weakref.ref[Any]:
        step = captured(job.build(), job.batch(0, length=5), varying={0: varying, 1: varying})
        return weakref.ref(next(iter(step.graph.graph.nodes)).meta["val"].fake_mode.shape_env)

    gone, _ = symbols_of_a_capture(), captured(job.build(), job.batch(0))
    for _ in range(2):  # tensors that C++ holds are freed by the second
        gc.collect()
    assert gone() is None


def test_a_capture_without_symbols_has_no_guard_that_lets_others_in():
    job = JOBS["mlp"]
    assert captured(job.build(), job.batch(0)).guard is None


def test_a_gradient_that_backward_uses_on_its_way_is_reduced_once():
    """x + a: the gradient of `a` is also what flows on to the layers before."""
    torch.manual_seed(0)

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(4, 3, bias=False)
            self.shift = nn.Parameter(torch.zeros(5, 3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.before(rows) + self.shift

    model = Shifted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training.of(model, lambda m, b: m(b[0]).square().mean(), optimizer)
    step = capture(training, (torch.ones(5, 4),))
    gm = canonicalize_sync(step.graph, 2)
    reduced = [node for node in gm.graph.nodes if node.target is ALL_REDUCE]
    assert len(reduced) == 2
    assert all(len(node.args[0].users) == 1 for node in reduced)


def test_a_batchs_type_tells_shapes_and_plain_values_apart():
    x = torch.zeros(2, 3)
    types = [batch_type(batch)[0] for batch in ((x, 1), (x, 2), (torch.zeros(4, 3), 1), (x.double(), 1), [x, 1])]
    assert len({(str(t.structure), t.leaves) for t in types}) == 5
    assert types[0].like() == types[2].like()
    assert len({t.like() for t in types}) == 4
    assert types[0].shapes == ((2, 3), None)


# Operators while they are traced

REAL = torch.ones(2)
PLACES = {
    "by itself": REAL,
    "in a list": [REAL, 1],
    "in a list of tuples": [(1, REAL)],
    "in a dict": {"x": REAL},
    "in lists of dicts": [1, {"x": [{"y": REAL}]}],
}


@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("given", PLACES.values(), ids=PLACES)
def test_a_real_tensor_is_exchanged_wherever_it_lies(given: Any, as_keyword: bool):
    seen: list[Any] = []

    def traced(value: Tensor) -> Tensor:
        mode = Constants((value,))
        if as_keyword:
            return value + mode.__torch_dispatch__(operator, (), (), {"given": given})
        return value + mode.__torch_dispatch__(operator, (), (given,))

    def operator(given: Any) -> Tensor:
        seen.extend(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
        return seen[-1]

    make_fx(traced, tracing_mode="fake")(torch.zeros(2))
    assert [type(tensor) for tensor in seen] == [FakeTensor]


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: linear(x, w),
    "linear of a transposed input": lambda x, w: linear(x.transpose(0, 1), w, w[0]),
    "batches and a matrix": lambda x, w: x @ w,
    "a matrix and batches": lambda x, w: w @ x.transpose(1, 2),
    "batches": lambda x, _: x @ x.transpose(1, 2),
    "batches and a vector": lambda x, w: x @ w[0],
    "einsum": lambda x, w: torch.einsum("bld,ed->ble", x, w),
    "matrices": lambda x, w: x[0] @ w,
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.one_in(3)
def test_a_product_and_its_gradients_make_no_number_of_a_symbol(name: str):
    def gradients(x: Tensor, w: Tensor) -> list[Tensor]:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        return list(torch.autograd.grad(PRODUCTS[name](x, w).sum(), [x, w], allow_unused=True))

    mode, _ = compat.fake_mode()
    x = compat.fake_with_dynamic_dims(mode, torch.ones(2, 5, 4), frozenset([1]), "x")
    w = compat.fake_with_dynamic_dims(mode, torch.ones(4, 4), frozenset(), "w")
    with mode:
        compat.trace(gradients, [x, w])
    assert compat.is_open(x.shape[1])
    assert torch.equal(torch.ones(2, 5, 4) @ torch.ones(4, 4), torch.full((2, 5, 4), 4.0)), "others are as before"


def test_writes_that_others_see_are_functionalized_by_tracing_again(monkeypatch: pytest.MonkeyPatch):
    again: list[object] = []
    trace = compat.trace_functional
    monkeypatch.setattr(compat, "trace_functional", lambda *a: again.append(a) or trace(*a))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch) * 2.0
        first = out[:, 0]
        out.add_(1.0)  # through the view, too
        return out.sum() + 3.0 * first.sum()

    torch.manual_seed(0)
    trains_as_eager(nn.Linear(3, 4), loss, [torch.randn(2, 3)], sgd, verify=1)
    assert len(again) == 1
