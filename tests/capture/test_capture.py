"""One graph holds the whole step, and what may change between steps stays an input of it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from jobs import JOBS, OPTIMIZERS, cross_entropy, mlp
from torch import Tensor, nn
from torch.fx.node import map_arg

import fxcomp
from fxcomp import compat
from fxcomp.capture import updates
from fxcomp.capture.batch_type import batch_type
from fxcomp.capture.step_inputs import FIXED_SIZES, Varying
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.graph import functional as functionalizing
from fxcomp.graph.captured import Captured
from fxcomp.graph.edit import gradients
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.ops import ALL_REDUCE
from fxcomp.passes.canonicalize_sync import canonicalize_sync


def captured(
    model: nn.Module,
    batch: Any,
    optimizer: Any = "sgd",
    loss: Any = cross_entropy,
    *,
    max_grad_norm: float | None = None,
    varying: Varying = FIXED_SIZES,
) -> Captured:
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    return capture(Training.of(model, loss, optimizer, max_grad_norm), batch, varying)


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


def test_symbolic_sizes_are_guarded_by_what_tracing_assumed():
    job = JOBS["transformer"]
    step = captured(job.build(), job.batch(0), varying={0: frozenset([1]), 1: frozenset([1])})
    fits = [step.guard(list(job.batch(1, length=length))) for length in (5, 6, 30)]
    assert fits == [True, True, True]
    uneven = [job.batch(1, length=5)[0], job.batch(1, length=6)[1]]
    assert not step.guard(uneven)


# Whole steps


def steps_like_eager(model: nn.Module, loss: Any, batches: list[Any], tolerance: float = 0.0) -> list[Any]:
    """Train compiled and eager side by side; returns what the compiled steps returned."""
    reference = copy.deepcopy(model)
    optimizer, reference_optimizer = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, reference))
    step = fxcomp.compile_step(model, loss, optimizer, batches[0], verify_every=1)
    torch.manual_seed(3)
    results = [step(batch) for batch in batches]
    torch.manual_seed(3)
    for batch in batches:
        reference_optimizer.zero_grad()
        result = loss(reference, batch)
        (result[0] if isinstance(result, tuple) else result).backward()
        reference_optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=0, atol=tolerance, msg=name)
    return results


def with_aux(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    out = model(batch["x"])
    loss = nn.functional.cross_entropy(out, batch["labels"][0])
    return loss, {
        "logits": out,
        "right": (out.argmax(1) == batch["labels"][0]).sum(),
        "pair": [out.max(), batch["scale"]],
    }


def test_a_loss_may_return_more_and_a_batch_may_be_any_tree():
    rows = [JOBS["mlp"].batch(i) for i in range(3)]
    batches = [{"x": x, "labels": [y], "scale": 2.0, "name": "train", "nothing": None} for x, y in rows]
    results = steps_like_eager(mlp(), with_aux, batches)
    for loss, aux in results:
        assert loss.dim() == 0
        assert not loss.requires_grad
        assert set(aux) == {"logits", "right", "pair"}
        assert aux["logits"].shape == (4, 10)
        assert float(aux["pair"][1]) == 2.0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(20, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(1))[0][:, -1])


class Branching(nn.Module):
    """Control flow over plain attributes and shapes is Python's, and specialised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.deep = nn.Linear(20, 10), nn.Linear(10, 10), True
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out = self.a(x)
        return self.b(out) if self.deep else out + 0 * self.b(out)


class PlainConstant(nn.Module):
    """A tensor that is no buffer is a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(20, 10), torch.full((10,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


def autocast_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, batch)


def test_a_recurrent_model_trains_as_eager_up_to_rounding():
    """Eager PyTorch runs oneDNN's fused LSTM, a compiled step its plain operators."""
    torch.manual_seed(0)
    steps_like_eager(Recurrent(), cross_entropy, [JOBS["mlp"].batch(i) for i in range(3)], tolerance=1e-6)


@pytest.mark.parametrize("build", [Branching, PlainConstant])
def test_models_of_many_kinds_train_as_eager(build: Any):
    torch.manual_seed(0)
    steps_like_eager(build(), cross_entropy, [JOBS["mlp"].batch(i) for i in range(3)])


def test_autocast_inside_the_loss_is_captured():
    torch.manual_seed(0)
    steps_like_eager(mlp(), autocast_loss, [JOBS["mlp"].batch(i) for i in range(3)])


def test_a_plain_attribute_that_changes_is_followed():
    torch.manual_seed(0)
    model = Branching()
    step = fxcomp.compile_step(
        model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), JOBS["mlp"].batch(0), verify_every=1
    )
    step(JOBS["mlp"].batch(0))
    first = step.source
    model.deep = False
    step(JOBS["mlp"].batch(0))
    assert step.source != first
    assert model.seen == 2


def test_parameter_groups_keep_their_own_numbers():
    torch.manual_seed(0)
    model = mlp()
    reference = copy.deepcopy(model)

    def two_groups(m: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in m.parameters() if p.dim() > 1]
        plain = [p for p in m.parameters() if p.dim() == 1]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 0.02}], lr=0.01
        )

    optimizer, other = two_groups(model), two_groups(reference)
    step = fxcomp.compile_step(model, cross_entropy, optimizer, JOBS["mlp"].batch(0), verify_every=1)
    for i in range(4):
        optimizer.param_groups[1]["lr"] = other.param_groups[1]["lr"] = 0.02 / (1 + i)
        step(JOBS["mlp"].batch(i))
        other.zero_grad()
        cross_entropy(reference, JOBS["mlp"].batch(i)).backward()
        other.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_optimizer_state_goes_to_eager_and_back():
    """The state stays the optimizer's own: save it, load it elsewhere, go on."""
    torch.manual_seed(0)
    model = mlp()
    reference = copy.deepcopy(model)
    batches = [JOBS["mlp"].batch(i) for i in range(6)]
    eager = OPTIMIZERS["adamw"](reference.parameters())

    def eager_step(batch: Any) -> None:
        eager.zero_grad()
        cross_entropy(reference, batch).backward()
        eager.step()

    for batch in batches:
        eager_step(batch)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = fxcomp.compile_step(model, cross_entropy, optimizer, batches[0], verify_every=1)
    for batch in batches[:3]:
        step(batch)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in batches[3:]:
        step(batch)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


# What a batch is


def test_a_batchs_type_tells_shapes_and_plain_values_apart():
    x = torch.zeros(2, 3)
    types = [batch_type(batch)[0] for batch in ((x, 1), (x, 2), (torch.zeros(4, 3), 1), (x.double(), 1), [x, 1])]
    assert len({(str(t.structure), t.leaves) for t in types}) == 5
    assert types[0].like() == types[2].like()
    assert len({t.like() for t in types}) == 4
    assert types[0].shapes == ((2, 3), None)


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


def text(step: Captured) -> list[tuple[str, str, str]]:
    """Every node as an operator with numbered arguments, whatever nodes and symbols are called."""
    number = {node: k for k, node in enumerate(step.graph.graph.nodes)}
    return [
        (
            str(node.target),
            str(map_arg(node.args, lambda used: number[used])),
            re.sub(r"(zu?f)\d+", r"\1", str(node.meta.get("val"))),
        )
        for node in step.graph.graph.nodes
    ]


@pytest.mark.parametrize("job", ["conv", "dropout"])
def test_writes_are_functionalized_without_a_second_trace_as_with_one(job: str, monkeypatch: pytest.MonkeyPatch):
    model, batch = JOBS[job].build(), JOBS[job].batch(0)
    quick = text(captured(model, batch))
    monkeypatch.setattr(functionalizing, "_plain_writes", lambda _: None)  # trace again
    assert text(captured(model, batch)) == quick
    written = ("copy_", "bernoulli_")
    assert sum(any(name in target for name in written) for target, _, _ in quick) == {"conv": 1, "dropout": 4}[job]


def test_writes_that_others_see_are_functionalized_by_tracing_again(monkeypatch: pytest.MonkeyPatch):
    again: list[object] = []
    trace = compat.trace_functional
    monkeypatch.setattr(compat, "trace_functional", lambda *a: again.append(a) or trace(*a))

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x) * 2.0
            first = out[:, 0]
            out.add_(1.0)  # through the view, too
            return out.sum() + 3.0 * first.sum()

    torch.manual_seed(0)
    model, batch = Seen(), torch.randn(2, 3)
    expected = model(batch).detach()
    step = fxcomp.compile_step(model, lambda m, x: m(x), OPTIMIZERS["sgd"](model.parameters()), batch, verify_every=1)
    assert len(again) == 1
    assert torch.equal(step(batch), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_is_traced_once_for_all_shapes_as_for_each(optimizer: str, monkeypatch: pytest.MonkeyPatch):
    model, batch = JOBS["conv"].build(), JOBS["conv"].batch(0)
    traced: list[str] = []
    trace = updates.trace_update
    monkeypatch.setattr(updates, "trace_update", lambda o, owner, *a: traced.append(owner.name) or trace(o, owner, *a))
    quick = text(captured(model, batch, optimizer))
    assert len(traced) == 1
    monkeypatch.setattr(updates, "resized_update", lambda *_: None)  # trace each
    assert text(captured(model, batch, optimizer)) == quick
    assert len(traced) == 1 + 4  # then one for each of four shapes


@pytest.mark.parametrize("job", ["mlp", "conv"])
def test_clipping_is_what_tracing_clip_grad_norm_gives(job: str):
    model: nn.Module = JOBS[job].build()
    batch, limit = JOBS[job].batch(0), 0.7
    if job == "conv":
        model = model.to(memory_format=torch.channels_last)
    fakes, _ = compat.fake_mode()
    step = captured(model, batch, max_grad_norm=limit)
    parameters = [dict(model.named_parameters())[name] for name in step.gradient_names]

    def clip(gradients: list[Tensor]) -> list[Tensor]:
        stand_ins = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
        for stand_in, gradient in zip(stand_ins, gradients, strict=True):
            stand_in.grad = gradient * 1.0  # clipped in place
        nn.utils.clip_grad_norm_(stand_ins, limit, foreach=False)
        return [stand_in.grad for stand_in in stand_ins if stand_in.grad is not None]

    with fakes:
        traced = compat.trace(clip, ([fakes.from_tensor(parameter.detach()) for parameter in parameters],))
    ours = [node for node in step.graph.graph.nodes if info(node).role is Role.CLIP]
    assert [_said(node) for node in ours] == [_said(node) for node in _clipping(traced)]


def _clipping(traced: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Without what makes stand-ins and copies of gradients."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    start = next(k for k, node in enumerate(nodes) if "norm" in node.name)
    return nodes[start:]


def _said(node: torch.fx.Node) -> tuple[Any, ...]:
    """An operator, its numbers, and how its result lies in memory."""
    name = str(node.target).split(".")[1].rstrip("_")
    value = node.meta["val"]
    numbers = [argument for argument in node.args if isinstance(argument, float | None)]
    return name, numbers, tuple(value.shape), value.stride()
