"""The step that a GPU would be given, counted without one: goldens of three models, and limits that must hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from counted_step import StepLaunches, count_launches
from launch_counter import LaunchCounter, multi_tensor_launches
from torch import Tensor, nn
from torch.nn import functional as F

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.commands.demo.gpt import gpt_job
from fxcomp.cost.devices import preset_named
from fxcomp.frontends import what_if
from fxcomp.frontends.job import Job
from fxcomp.frontends.what_if import capture_job, rewritten
from fxcomp.graph.run_passes import finished
from fxcomp.passes import clip_in_lists, fuse_updates
from fxcomp.pipeline import Compiler
from fxcomp.plan.compress import Compress
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

WHERE = Cluster.parse("2x1", intra=Link.parse("100gbit"), inter=Link.parse("10gbit"))
PLANS = ("dense", "int8", "powersgd(2)")


class Residual(nn.Module):
    """Two convolutions with batch norms, and what comes in added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_1(self.conv_1(x)).relu()
        return (x + self.norm_2(self.conv_2(inner))).relu()


def resnet() -> Job:
    blocks = [Residual(16) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    return Job(model, classified, optimizer, (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)))


def layers(count: int, width: int = 16, **options: Any) -> Job:
    """A perceptron: a weight and a bias a layer."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return Job(model, classified, optimizer, (torch.zeros(4, width), torch.zeros(4, dtype=torch.long)), max_grad_norm=1)


def classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


JOBS: dict[str, Callable[[], Job]] = {"gpt": gpt_job, "resnet": resnet, "482 tensors": lambda: layers(241)}


def counted(job: Job, how: str = "dense") -> StepLaunches:
    found = count_launches(rewritten(job, WHERE, Compress.parse(how), "h100"))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["gpt", "resnet", pytest.param("482 tensors", marks=pytest.mark.slow)])
def test_what_a_step_hands_to_the_device(
    name: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
):
    job = JOBS[name]()
    captured = capture_job(job, "h100")

    def once_for_all_plans(_: Job, device: str | None) -> object:
        assert device == "h100"
        return captured

    monkeypatch.setattr(what_if, "capture_job", once_for_all_plans)
    texts = [f"{how}\n" + "\n".join(f"  {line}" for line in counted(job, how).lines()) for how in PLANS]
    golden(f"count_launches/{name.replace(' ', '_')}.txt", "\n".join(texts))


# Limits


def in_buckets(job: Job, buckets: int) -> tuple[StepLaunches, int]:
    """Count the dense step of a job whose gradients leave in so many buckets; returns its collectives, too."""
    _, captured = capture_job(job, "h100")
    costs = preset_named("h100").costs(())
    sizes = Compiler(WHERE).analyze(captured.graph, costs).sizes
    names = list(sizes)
    cuts = [names[k * len(names) // buckets : (k + 1) * len(names) // buckets] for k in range(buckets)]
    dense = Strategy.parse("all_reduce@world")
    plan = Plan(tuple(Bucket(tuple(each), tuple(sizes[name] for name in each), dense) for each in cuts))
    found = count_launches(finished(Compiler(WHERE).emit(captured, plan, costs)))
    assert found is not None
    return found, found.of("collective").launches


@pytest.fixture(scope="module")
def of_25_layers() -> tuple[StepLaunches, int]:
    return in_buckets(layers(25, fused=True), 6)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "counters of the host"])
def test_50_parameters_in_6_buckets_take_few_launches(is_fused: bool, of_25_layers: tuple[StepLaunches, int]):
    found, collectives = of_25_layers if is_fused else in_buckets(layers(25), 6)
    assert collectives == 6
    assert found.of("pack").launches <= 6
    assert found.of("clip").launches <= 12
    assert found.of("update").launches <= 12
    assert found.total.launches <= 6 + 12 + 12 + 2 * collectives
    assert found.total.waits == 0


def test_bucket_by_bucket_an_update_takes_two_launches():
    found, _ = in_buckets(replace(layers(25, fused=True), max_grad_norm=None), 6)
    assert found.of("update").launches == 12
    assert found.of("clip").launches == 0


def test_adamw_passes_over_memory_once(of_25_layers: tuple[StepLaunches, int]):
    job, found = layers(25, fused=True), of_25_layers[0]
    size = sum(4 * parameter.numel() for parameter in job.model.parameters())
    assert found.of("update").touched_bytes == pytest.approx(7 * size, rel=0.01)  # four read, three written
    assert found.of("clip").touched_bytes == pytest.approx(3 * size, rel=0.01)
    assert found.of("pack").touched_bytes == 2 * size


# The count sees what it is there for


def test_without_lists_and_fused_updates_the_limits_are_passed(monkeypatch: pytest.MonkeyPatch):
    for module in (clip_in_lists, fuse_updates):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(f"fxcomp.pipeline.{name}", lambda gm, **_: gm)
    found, _ = in_buckets(layers(25, fused=True), 6)
    assert found.of("clip").launches >= 100
    assert found.of("update").launches > 12


def there(tensor: Tensor) -> bool:
    return tensor.is_meta


def test_a_read_by_the_host_is_counted():
    counter = LaunchCounter(there)
    with counter:
        assert bool(torch.ones(3, device="meta").all())
        assert float(torch.ones(1)) == 1.0, "a value of the host is no read"
    assert (counter.found["step"].launches, counter.found["step"].reads) == (2, 1)


def test_views_and_memory_are_no_launches():
    counter = LaunchCounter(there)
    with counter:
        value = torch.empty(6, device="meta")
        value.view(2, 3).t().split(1)
        value[2:].detach()
    assert counter.found["step"].launches == 0


def test_bytes_are_read_and_written_once_each():
    counter = LaunchCounter(there)
    value = torch.empty(100, device="meta")
    with counter:
        value.add_(value)
        value.fill_(1.0)
        value.copy_(torch.empty(100, device="meta"))
        torch.mul(value, 2.0)
    assert counter.found["step"].touched_bytes == 400 * (2 + 1 + 2 + 2)
    assert counter.found["step"].launches == 4


def test_copies_between_host_and_device_wait():
    counter = LaunchCounter(there)
    device = torch.empty(4, device="meta")
    with counter:
        device.copy_(torch.zeros(4))
        torch.zeros(4).copy_(device)
    assert (counter.found["step"].copies, counter.found["step"].launches) == (2, 0)


@pytest.mark.parametrize(
    ("sizes", "lists", "launches"),
    [
        ([1] * 36, 4, 1),
        ([1] * 37, 4, 2),
        ([1] * 150, 4, 5),
        ([1] * 64, 2, 1),
        ([1] * 65, 2, 2),
        ([65_536 * 320], 1, 1),
        ([65_536 * 320 + 1], 1, 2),
        ([0, 0], 1, 0),
    ],
)
def test_a_list_takes_as_many_kernels_as_their_arguments_hold(sizes: Sequence[int], lists: int, launches: int):
    assert multi_tensor_launches(sizes, lists) == launches


def test_lists_that_lie_otherwise_are_worked_on_one_by_one():
    counter = LaunchCounter(there)
    values = [torch.empty(3, 2, device="meta") for _ in range(5)]
    with counter, counter.counting("alike"):
        torch._foreach_copy_(values, [torch.empty(3, 2, device="meta") for _ in range(5)])  # pyright: ignore
    with counter, counter.counting("turned"):
        torch._foreach_copy_(values, [torch.empty(2, 3, device="meta").t() for _ in range(5)])  # pyright: ignore
    assert (counter.found["alike"].launches, counter.found["turned"].launches) == (1, 5)


def test_an_offload_to_the_host_is_not_counted():
    offload = Compress.parse("compress(int8)@cpu > all_gather@world > decompress@cpu")
    assert count_launches(rewritten(layers(2), WHERE, offload, "h100")) is None


def test_a_real_step_is_not_changed_by_being_imagined():
    job = layers(2)
    before = rewritten(job, WHERE, Compress.parse("dense")).source
    rewritten(job, WHERE, Compress.parse("dense"), "h100")
    assert rewritten(job, WHERE, Compress.parse("dense")).source == before
    assert "_fused_" not in before
    assert not compat.is_accelerator(torch.device("meta"))
