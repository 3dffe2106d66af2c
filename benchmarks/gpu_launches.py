"""Count launches of one step of the example GPT without a GPU: fxcomp's step and DDP's with a fused AdamW.

    python benchmarks/gpu_launches.py                  a table
    python benchmarks/gpu_launches.py --json FILE      records, too

fxcomp's step is captured here, moved to an H100 in the graph and emitted. Its lines run on meta tensors. DDP's step
runs eagerly on the CPU in a group of one rank, under a counter that treats every tensor as the GPU's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from counted_step import KINDS, count_launches
from launch_counter import LaunchCounter, Tally
from records import Records, options, table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.commands.demo.gpt import gpt_job, loss_fn
from fxcomp.frontends.what_if import rewritten
from fxcomp.plan.compress import Compress

PLANS = ("dense", "int8", "powersgd(2)")
WHERE = Cluster.parse("2x1", intra=Link.parse("100gbit"), inter=Link.parse("10gbit"))

BODY = "forward and backward"


def main() -> None:
    arguments = options(__doc__).parse_args()
    records = Records(arguments.json)
    records.add(*ddp_records(), *(record for plan in PLANS for record in fxcomp_records(plan)))
    head = "step | kind | launches > | device MB > | host reads > | waits >"
    rows = [
        (r["step"], r["kind"], r["launches"], f"{r['touched_bytes'] / 1e6:.1f}", r["reads"], r["reads"] + r["copies"])
        for r in records.found
    ]
    print(table(head, rows))


def fxcomp_records(plan: str) -> Iterator[dict[str, Any]]:
    found = count_launches(rewritten(gpt_job(), WHERE, Compress.parse(plan), "h100"))
    assert found is not None, "the example GPT can be counted"
    kinds = [(kind, found.kinds[kind]) for kind in KINDS if kind in found.kinds]
    for kind, each in (*kinds, ("beside forward and backward", found.total)):
        yield record(f"fxcomp, {plan}", kind, each)


def ddp_records() -> Iterator[dict[str, Any]]:
    """Count DDP's step, with foreach clipping and a fused AdamW, after its buckets are made."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = gpt_job()
    alone = copy.deepcopy(job.model)
    body = stepped(alone, alone, job.batch)[BODY]
    found = stepped(DistributedDataParallel(job.model, gradient_as_bucket_view=True), job.model, job.batch)
    dist.destroy_process_group()
    sent = found.pop("collective")
    found["pack"] = difference(found.pop(BODY), body)
    found["collective"] = sent
    total = Tally()
    for kind in ("pack", "collective", "clip", "update"):
        for name in Tally.__slots__:
            setattr(total, name, getattr(total, name) + getattr(found[kind], name))
        yield record("DDP, fused AdamW", kind, found[kind])
    yield record("DDP, fused AdamW", "beside forward and backward", total)


def stepped(model: nn.Module, plain: nn.Module, batch: Any) -> dict[str, Tally]:
    """Count a model's third step; DDP rebuilds its buckets in the second."""
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    counter = SendingCounter(lambda _: True)
    for _ in range(3):
        counter.found.clear()
        optimizer.zero_grad()
        with counter, counter.counting(BODY):
            loss_fn(model, batch).backward()
        with counter, counter.counting("clip"):
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=True)
        with counter, counter.counting("update"):
            optimizer.step()
    return counter.found


class SendingCounter(LaunchCounter):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            with self.counting("collective"):
                self.add(args[0])
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def difference(one: Tally, other: Tally) -> Tally:
    return Tally(*(getattr(one, name) - getattr(other, name) for name in Tally.__slots__))


def record(step: str, kind: str, counted: Any) -> dict[str, Any]:
    names = ("launches", "touched_bytes", "reads", "copies")
    return {"step": step, "kind": kind, **{name: getattr(counted, name) for name in names}}


if __name__ == "__main__":
    main()
