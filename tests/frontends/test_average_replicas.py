"""`fxcomp.average_replicas`: a model sharded over one dimension of a mesh is averaged over the other one by a plan.

Cases that can share a spawn do: ranks report numbers, which the tests judge.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.errors import FxcompError
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.state.checksums import sealed

STEPS = 4
WIDTH = 30
"""No multiple of what padding fills: a shard of the last layer, of 5 rows, has a row of zeros on one rank."""


def plan_of(strategy: str) -> Plan:
    """A bucket for each module that is sharded, in the order of a backward pass; sizes are those of shards."""
    how = Strategy.parse(strategy)
    last = Bucket(("3.weight", "3.bias"), (3 * WIDTH, 3), how)
    return Plan((last, *(Bucket((f"{k}.0.weight", f"{k}.0.bias"), (15 * WIDTH, 15), how) for k in (2, 1, 0))))


DENSE = plan_of("all_reduce@world")
INT4 = plan_of("compress(int4) > all_gather@world > decompress")


def mesh_of_2_by_2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def model_of(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


def sharded(mesh: DeviceMesh, seed: int = 3, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    model = model_of(seed).to(dtype)
    for layer in model[:3]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, WIDTH, generator=generator)
    dtype = next(iter(model.parameters())).dtype
    target = inputs[:, :5].cumsum(1).tanh()
    return (model(inputs.to(dtype)).float() - target).square().mean()


def local(model: nn.Module) -> Tensor:
    """All that this rank holds."""
    return torch.cat([p.detach().to_local().flatten().float() for p in model.parameters()])  # type: ignore[union-attr]


def trained(
    model: nn.Module, *, micro: int = 1, keep: Any = None, clip: float | None = None, scaler: Any = None
) -> tuple[Tensor, list[float]]:
    """Train with SGD and momentum; `keep(model)` is a context for all micro-batches of a step but the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            with keep() if keep is not None and part < micro - 1 else nullcontext():
                loss = loss_of(model, step * micro + part)
                (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return local(model), losses


def replicas_are_same(mine: Tensor, mesh: DeviceMesh) -> bool:
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine.contiguous(), group=mesh["replicate"].get_group())
    return torch.equal(*both)


def averaged(mesh: DeviceMesh, plan: Any, seed: int = 3, **options: Any) -> tuple[nn.Sequential, fxcomp.ReplicaAverage]:
    scaler = options.pop("scaler", None)
    feedback = {"feedback": options.pop("feedback")} if "feedback" in options else {}
    model = sharded(mesh["shard"], seed, **options)
    outer = fxcomp.average_replicas(
        model, mesh["replicate"], costs=CostTable(), scaler=scaler, **gathered(plan=plan, **feedback)
    )
    return model, outer


def compare_dense() -> dict[str, Any]:
    mesh = mesh_of_2_by_2()
    found: dict[str, Any] = {}

    def far(case: str, mine: Tensor, native: Tensor) -> None:
        found[case] = float((mine - native).abs().max())

    model, outer = averaged(mesh, DENSE, seed=3 + dist.get_rank() // 2)
    far("one batch a step, clipped", trained(model, clip=0.05)[0], trained(sharded(mesh), clip=0.05)[0])
    outer.close()

    native = trained(sharded(mesh), micro=2)[0]
    model, outer = averaged(mesh, DENSE)
    far("each micro-batch averaged", trained(model, micro=2)[0], native)
    outer.close()

    model, outer = averaged(mesh, DENSE)
    far("sums of shards", trained(model, micro=2, keep=outer.no_sync)[0], native)
    outer.close()

    bf16: Any = {"dtype": torch.bfloat16, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    model, outer = averaged(mesh, DENSE, **bf16)
    far("trained in bf16", trained(model)[0], trained(sharded(mesh, **bf16))[0])
    outer.close()
    return found


def test_a_dense_outer_average_trains_as_native_hsdp_does():
    for found in run_ranks(4, compare_dense):
        assert found.pop("trained in bf16") <= 2e-2  # a rounding of a parameter
        assert max(found.values()) <= 2e-6, found


def sent_between_replicas(sent: list[int], replicas: list[int]) -> Callable[[str], None]:
    """Count the bytes of this rank's messages to other replicas."""

    def count(name: str) -> None:
        plain = getattr(dist, name)

        def counted(value: Tensor, *arguments: Any, **options: Any) -> Any:
            group = options.get("group")
            if group is not None and dist.get_process_group_ranks(group) == replicas:
                sent.append(value.numel() * value.element_size())
            return plain(value, *arguments, **options)

        setattr(dist, name, counted)

    return count


def compare_compressed() -> dict[str, Any]:
    mesh, me = mesh_of_2_by_2(), dist.get_rank()
    found: dict[str, Any] = {}
    sent: list[int] = []
    count = sent_between_replicas(sent, [me % 2, me % 2 + 2])
    for name in ("all_reduce", "isend"):
        count(name)

    model, outer = averaged(mesh, INT4, seed=3 + me // 2)
    mine, losses = trained(model)
    found["same"] = replicas_are_same(mine, mesh)
    native, dense_losses = trained(sharded(mesh))
    found["apart"] = float((mine - native).abs().max())
    found["losses"] = losses[-1] / dense_losses[-1]
    sent.clear()
    loss_of(model, 9).backward()
    found["sent"] = [each for each in sent if each > 8]
    saved = copy.deepcopy(outer.state_dict())
    kept = outer.checkpoint()
    found["keys"] = sorted(kept)
    found["owes"] = sum(float(piece["values"].abs().sum()) for each in saved["residuals"].values() for piece in each)
    found["source"], found["report"] = outer.source, outer.report()

    # The same state goes on in the same way.
    before = copy.deepcopy([p.detach().to_local() for p in model.parameters()])
    model.zero_grad()
    outer.load_state_dict(saved)
    first = trained(model)[0]
    again, fresh = averaged(mesh, None)
    for parameter, value in zip(again.parameters(), before, strict=True):
        parameter.detach().to_local().copy_(value)
    fresh.load_state_dict({**saved, "a user's": 1})
    waiting: Any = fresh.state_dict()
    found["waits"] = list(waiting) == [*saved, "a user's"] and waiting["checksum"] == saved["checksum"]
    fresh.load_state_dict(fresh.checkpoint())
    found["goes on"] = bool(torch.equal(trained(again)[0], first))
    with suppress_to(found, "another shard"):
        fresh.load_state_dict(sealed({**saved, "shard": [1 - me % 2, 2]}))
    for each in (outer, fresh):
        each.close()
    return found


@contextmanager
def suppress_to(found: dict[str, Any], what: str) -> Generator[None]:
    try:
        yield
    except FxcompError as error:
        found[what] = f"{type(error).__name__}: {error}"


def test_a_compressed_outer_average_sends_shards_once_and_keeps_replicas_the_same():
    everywhere = run_ranks(4, compare_compressed)
    assert all(key.startswith(f"rank{rank}.") for rank, found in enumerate(everywhere) for key in found["keys"])
    for found in everywhere:
        assert found["same"]
        assert 0 < found["apart"] < 5e-2
        assert abs(found["losses"] - 1) < 0.01
        elements = sum(sum(bucket.sizes) for bucket in INT4.buckets)
        assert elements / 2 <= sum(found["sent"]) <= 0.8 * elements  # half a byte an element, and the scales
        assert len(found["sent"]) == len(INT4.buckets)
        assert found["owes"] > 0
        assert "arrive_3 = yield 3" in found["source"]
        assert "gradients are averaged over ranks" in " ".join(found["report"].split())
        assert found["waits"]
        assert found["goes on"]
        assert found["another shard"].startswith("BadState: this state is of shard")


def spoil_one_element(layer: nn.Module, _: Any) -> None:
    """Let the gradient of the last bias have an infinity; its place is in the other rank's shard."""
    last = torch.tensor([0.0, 0.0, 0.0, 0.0, torch.inf])
    layer.get_parameter("bias").register_hook(lambda gradient: gradient + last)


def skip_on_all_ranks() -> dict[str, Any]:
    """An infinity comes on one rank, in an element of one shard."""
    mesh, me = mesh_of_2_by_2(), dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    model, outer = averaged(mesh, INT4, scaler=scaler)
    trained(model, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def owed() -> list[Tensor]:
        return [piece["values"] for each in outer.state_dict()["residuals"].values() for piece in each]

    before, parameters = owed(), local(model)
    optimizer.zero_grad()
    if me == 0:
        model[3].register_forward_pre_hook(spoil_one_element)
    scaler.scale(loss_of(model, 7)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    apart = max(float((a - b).abs().max()) for a, b in zip(owed(), before, strict=True))
    found = {"scale": scaler.get_scale(), "moved": bool((local(model) != parameters).any()), "apart": apart}
    outer.close()
    return found


def test_an_infinity_in_one_shard_is_skipped_by_all_ranks_and_costs_no_residual():
    for found in run_ranks(4, skip_on_all_ranks):
        assert found["scale"] == 4.0
        assert not found["moved"]
        assert found["apart"] <= 1e-5


class Some(nn.Module):
    """Calls its first layer twice, and the second one never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[0](self.layers[0](x)))[:, :5].clone()


def refusals() -> dict[str, str]:
    mesh = mesh_of_2_by_2()
    found: dict[str, str] = {}
    shard, replicate = mesh["shard"], mesh["replicate"]

    def refused(case: str, model: nn.Module, replicas: Any = replicate, **options: Any) -> None:
        with suppress_to(found, case):
            fxcomp.average_replicas(model, replicas, costs=CostTable(), **gathered(**options))

    def raised(case: str, model: nn.Module) -> None:
        outer = fxcomp.average_replicas(model, replicate, costs=CostTable())
        with suppress_to(found, case):
            loss_of(model, 0).backward()
        outer.close()

    refused("two dimensions", sharded(mesh))
    refused("whole mesh", sharded(shard), mesh)
    refused("the other dimension", sharded(shard), shard)
    refused("nothing sharded", model_of())
    parts = model_of()
    fully_shard(parts[0], mesh=shard)
    refused("a part", parts)
    divided = sharded(shard)
    divided.set_gradient_divide_factor(3.0)  # type: ignore[operator]
    refused("a divisor", divided)
    refused("no values", fully_shard(nn.Linear(4, 4, device="meta"), mesh=shard))
    refused("rates", sharded(shard), feedback=fxcomp.ErrorFeedback(scale_with_lr=True))

    raised("fp16", sharded(shard, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)))
    hooked = sharded(shard)
    next(iter(hooked.parameters())).register_post_accumulate_grad_hook(lambda _: None)
    raised("a hook of a gradient", hooked)
    never = Some()
    fully_shard(never.layers[1], mesh=shard)
    never.layers[0].requires_grad_(False)
    raised("never", fully_shard(never, mesh=shard))
    unused = Some()
    raised("unused", fully_shard(unused, mesh=shard))
    return found


def test_what_cannot_be_averaged_is_refused_with_what_to_do():
    for found in run_ranks(4, refusals):
        for case, error, words in (
            ("two dimensions", "Unsupported", 'average_replicas(model, mesh["replicate"])'),
            ("whole mesh", "BadOption", "a mesh of 2 dimensions"),
            ("the other dimension", "BadOption", "hold different shards"),
            ("nothing sharded", "BadOption", "nothing that is sharded"),
            ("a part", "Unsupported", "'1.0.weight' is trained and not sharded"),
            ("a divisor", "Unsupported", "scale the loss"),
            ("no values", "Unsupported", "'weight' has no values yet"),
            ("rates", "BadOption", "fully_shard leaves yours"),
            ("fp16", "Unsupported", "reduce_dtype=torch.float32"),
            ("a hook of a gradient", "Unsupported", "Step the optimizer after backward"),
            ("never", "Unsupported", "no gradients of module 'layers.1'"),
            ("unused", "Unsupported", "set_reduce_scatter_unused_params"),
        ):
            assert found.get(case, "").startswith(error), (case, found.get(case))
            assert words in found[case], (case, found[case])
