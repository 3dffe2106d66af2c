"""The scripts that a GPU is asked to train are trained on the CPU first."""

import pytest
import torch
from gpu_scripts import SCRIPTS, SHARDED, largest_distance, sharded_distance
from helpers.ranks import run_ranks

FAST = ("autocast in fp16 with a scaler",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SCRIPTS]
)
def test_a_script_trains_compiled_as_it_does_eagerly(name: str):
    is_right, said = largest_distance(name, torch.device("cpu"), 3)
    assert is_right, said


def distances() -> dict[str, tuple[bool, str]]:
    return {plan: sharded_distance(plan, torch.device("cpu"), 3) for plan in SHARDED}


@pytest.mark.slow
def test_a_sharded_model_trains_as_natively():
    for found in run_ranks(2, distances):
        assert all(is_right for is_right, _ in found.values()), found
        assert not found["topk(0.1)"][1].startswith("0 "), "nothing was compressed"
