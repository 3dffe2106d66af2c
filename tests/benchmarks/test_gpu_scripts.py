"""The scripts that a GPU is asked to train are trained on the CPU first."""

import pytest
import torch
from gpu_scripts import SCRIPTS, largest_distance

FAST = ("autocast in fp16 with a scaler",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SCRIPTS]
)
def test_a_script_trains_compiled_as_it_does_eagerly(name: str):
    is_right, said = largest_distance(name, torch.device("cpu"), 3)
    assert is_right, said
