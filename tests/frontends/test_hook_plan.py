"""A chosen plan is fitted to DDP's buffers."""

from __future__ import annotations

import torch

from fxcomp.frontends.hook_plan import fit
from fxcomp.frontends.hook_program import DdpBucket, runs_of
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy

INT8 = Strategy.parse("compress(int8) > all_gather@world > decompress")
ROWS = 300_000
"""More than LEAST_BYTES, in fp32."""


def layout() -> tuple[DdpBucket, ...]:
    """Two buffers: the last layer is ready first."""
    return tuple(
        DdpBucket((f"{k}.bias", f"{k}.weight"), ((10,), (10, ROWS // 10)), (10, ROWS), torch.float32) for k in (1, 0)
    )


def test_a_vector_goes_with_the_matrix_beside_it_and_buckets_end_with_buffers():
    plan = Plan(
        (
            Bucket(("0.weight", "1.weight"), (ROWS, ROWS), DENSE),
            Bucket(("0.bias", "1.bias"), (10, 10), DENSE),
        )
    )
    found = fit(plan, layout())
    assert [bucket.names for bucket in found.buckets] == [("1.bias", "1.weight"), ("0.bias", "0.weight")]
    assert found.sizes == plan.sizes
    assert [(run.start, run.ddp_start, run.length) for run in runs_of(found, layout())] == [(0, 0, ROWS + 10)] * 2


def test_vectors_that_travel_otherwise_stay_together():
    plan = Plan(
        (
            Bucket(("1.weight",), (ROWS,), INT8),
            Bucket(("0.weight",), (ROWS,), INT8),
            Bucket(("0.bias", "1.bias"), (10, 10), DENSE),
        )
    )
    found = fit(plan, layout())
    assert [bucket.names for bucket in found.buckets] == [("1.weight",), ("0.weight",), ("1.bias", "0.bias")]


def test_parts_of_a_matrix_stay_in_their_buckets():
    half = ROWS // 2
    plan = Plan(
        (
            Bucket(("1.weight", "1.bias"), (ROWS, 10), INT8),
            Bucket(("0.weight",), (half,), INT8),
            Bucket(("0.bias", "0.weight"), (10, half), INT8, (0, half)),
        )
    )
    found = fit(plan, layout())
    assert [(bucket.names, bucket.starts) for bucket in found.buckets] == [
        (("1.bias", "1.weight"), (0, 0)),
        (("0.bias", "0.weight"), (0, 0)),
        (("0.weight",), (half,)),
    ]
