"""`fxcomp.compress_reduce_scatter`: plain FSDP's gradients are compressed on their way to who holds the parameters.

Cases that can share a spawn do: ranks report numbers, which the tests judge.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.ranks import run_ranks
from helpers.scattered import compressed, loss_of, model_of, owed_of, sharded, told, trained, whole_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fxcomp
from fxcomp.compressors import parse_compressor
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.runtime.transfers import Pattern

# Dense


def compare_dense() -> dict[str, bool]:
    bf16: Any = {"dtype": torch.bfloat16, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "one batch, clipped": ({}, {"clip": 0.05}),
        "whole gradients summed up": ({}, {"micro": 2}),
        "trained in bf16": (bf16, {}),
        "sums forced": ({"force": True}, {}),
    }
    found: dict[str, bool] = {}
    for case, (options, how) in cases.items():
        both: list[Tensor] = []
        for ours in (False, True):
            given = dict(options)
            force = given.pop("force", False)
            model = sharded(**given)
            if force:
                model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
            scatter = compressed("dense", model)[1] if ours else None
            both.append(trained(model, **how))
            if scatter is not None:
                scatter.close()
        found[case] = torch.equal(*both)
    return found


def test_a_dense_plan_trains_as_fully_shard_does_to_the_bit():
    for found in run_ranks(3, compare_dense):
        assert len(found) == 4
        assert all(found.values()), found


# Compressed


def reference_step(name: str, gradients: list[dict[str, Tensor]], kept: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Compress as docs/sharding.md says, rank by rank; `kept` is replaced. Parts are cut here by torch.chunk."""
    compressor, ranks = parse_compressor(name), len(gradients)
    means: dict[str, Tensor] = {}
    for module in ("3", "2.0", "1.0", "0.0"):
        names = [f"{module}.weight", f"{module}.bias"]
        for owner in range(ranks):
            payloads: list[Tensor] = []
            segments: tuple[int, ...] = ()
            for rank in range(ranks):
                parts = [part_of(gradients[rank][each], owner, ranks) for each in names]
                waiting = [part_of(kept[rank][each], owner, ranks) for each in names]
                segments = tuple(map(Tensor.numel, parts))
                made = compressor.compress_reference(EncoderInput(torch.cat(parts), torch.cat(waiting), segments))
                payloads.append(made.payload)
                assert made.residual is not None
                for each, left in zip(names, made.residual.split(segments), strict=True):
                    put_part(kept[rank][each], left, owner, ranks)
            given = DecoderInput(torch.cat(payloads), ranks, segments, None, None)
            for each, mean in zip(names, compressor.decompress_reference(given).split(segments), strict=True):
                put_part(means.setdefault(each, torch.zeros_like(gradients[0][each])), mean, owner, ranks)
    return means


def rows(value: Tensor, owner: int, ranks: int) -> Tensor:
    chunks = value.chunk(ranks)
    return chunks[owner] if owner < len(chunks) else value[:0]


def part_of(value: Tensor, owner: int, ranks: int) -> Tensor:
    most = value.chunk(ranks)[0].numel()
    part = rows(value, owner, ranks).flatten()
    return torch.cat([part, part.new_zeros(most - part.numel())])


def put_part(value: Tensor, part: Tensor, owner: int, ranks: int) -> None:
    there = rows(value, owner, ranks)
    there.copy_(part[: there.numel()].view(there.shape))


def compare_with_reference(name: str) -> dict[str, Any]:
    me, ranks = dist.get_rank(), dist.get_world_size()
    model, scatter = compressed(name)
    alone = [model_of() for _ in range(ranks)]
    kept = [{n: torch.zeros_like(p) for n, p in alone[0].named_parameters()} for _ in range(ranks)]
    apart = 0.0
    for step in range(3):
        gradients: list[dict[str, Tensor]] = []
        for rank, each in enumerate(alone):
            each.zero_grad()
            loss_of(each, step, rank).backward()
            gradients.append({n: p.grad.clone() for n, p in each.named_parameters() if p.grad is not None})
        expected = reference_step(name, gradients, kept)
        model.zero_grad()
        loss_of(model, step).backward()
        for each, gradient in whole_gradients(model).items():
            apart = max(apart, float((gradient - expected[each]).abs().max()))
    owes = owed_of(scatter)
    owed_apart = max(float((owes[n] - kept[me][n].flatten()).abs().max()) for n in owes)
    return {"apart": apart, "owed apart": owed_apart, "owes": len(owes), "report": scatter.report()}


@pytest.mark.parametrize("name", ["int4", "topk(0.1)"])
def test_each_part_is_compressed_with_its_residual_and_averaged_by_its_owner(name: str):
    for found in run_ranks(3, compare_with_reference, name):
        assert found["apart"] <= 1e-7
        assert found["owed apart"] <= 1e-7
        assert found["owes"] == 8
        assert "2.0.weight" not in found["report"]
        assert "Error feedback keeps" in found["report"]


def send_bytes(plan: str) -> tuple[int, float]:
    """Count the payload bytes that this rank sends in a pass, and compare losses."""
    model, scatter = compressed(plan)
    moved: list[int] = []
    transport = scatter._job.site.transport
    plain = transport.start

    def counted(transfer: Any) -> Any:
        if transfer.pattern is Pattern.ALL_TO_ALL:
            moved.append(transfer.value.numel() * transfer.value.element_size())
        return plain(transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "start", counted)
        loss_of(model, 0).backward()
    sent = sum(moved)
    trained(model, range(20))
    mine = loss_of(model, 99).item()
    native = sharded()
    trained(native, range(20))
    return sent, mine / loss_of(native, 99).item()


def test_int8_sends_a_quarter_and_trains_alike():
    elements = sum(p.numel() for p in model_of().parameters())
    for sent, ratio in run_ranks(2, send_bytes, "int8"):
        assert elements <= sent <= 1.2 * elements  # fp32 has four times as many
        assert abs(ratio - 1) < 0.01


# Refused


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}

    def refused(case: str, model: nn.Module, **options: Any) -> None:
        with told(found, case):
            fxcomp.compress_reduce_scatter(model, **gathered(**options))

    refused("two dimensions", sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))))
    refused("nothing sharded", model_of())
    refused("low rank", sharded(), plan="powersgd(4)")
    refused("two shots", sharded(), plan=str(Strategy.two_shots(parse_compressor("int4"), parse_compressor("int8"))))
    refused("another plan", sharded(), plan=Plan(()))
    refused("no values", fully_shard(nn.Linear(4, 4, device="meta")))
    refused("rates", sharded(), feedback=fxcomp.ErrorFeedback(scale_with_lr=True))
    optimizer: Any = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    refused("no scaler", sharded(), scaler=optimizer)
    refused("different options", sharded(), within="balanced" if dist.get_rank() else "lossy")
    twice = sharded()
    fxcomp.compress_reduce_scatter(twice, compress="int8")
    refused("twice", twice)
    divided, scatter = compressed("int8")
    divided.set_gradient_divide_factor(3.0)
    with told(found, "a divisor"):
        loss_of(divided, 0).backward()
    scatter.close()
    with told(found, "too early"):
        compressed(None)[1].report()
    return found


def test_what_cannot_be_scattered_is_refused_with_what_to_do():
    for found in run_ranks(2, refusals):
        for case, error, words in (
            ("two dimensions", "Unsupported", 'average_replicas(model, mesh["replicate"])'),
            ("nothing sharded", "BadOption", "nothing that is sharded"),
            ("low rank", "BadPlan", "needs whole parameters"),
            ("two shots", "BadPlan", "compressed once at most"),
            ("another plan", "BadPlan", "the plan has no bucket of"),
            ("no values", "Unsupported", "'weight' has no values yet"),
            ("rates", "BadOption", "fully_shard leaves yours"),
            ("no scaler", "BadOption", "it is a SGD"),
            ("different options", "ReplicasDiffer", "mode"),
            ("twice", "Unsupported", "call it once a model"),
            ("a divisor", "Unsupported", "set_gradient_divide_factor"),
            ("too early", "FxcompError", "there is no plan yet"),
        ):
            assert found[case].startswith(error), (case, found[case])
            assert words in found[case], (case, found[case])
