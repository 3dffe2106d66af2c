"""Models of a public library train as eager, where the library is installed (`pip install -e '.[models]'`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import json, sys
from public_training import Way, train
record = train(sys.argv[1], 0, 1, Way(checkpoints=sys.argv[2] == "checkpoints"))
print(json.dumps([record.result, record.detail]))
"""


def trained(family: str, way: str = "") -> list[str]:
    """Train in a process of its own, whose matrix products round alike wherever their operands lie.

    On some processors MKL's do not, and the captured step has other copies of some operands than eager has.
    """
    environment = {**os.environ, "MKL_CBWR": "COMPATIBLE", "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", SCRIPT, family, way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral"])
def test_a_public_model_trains_as_eager(family: str):
    assert trained(family) == ["identical", ""]


@pytest.mark.slow
def test_the_librarys_switch_for_checkpointing_is_followed_with_dropout():
    assert trained("gpt2", "checkpoints") == ["identical", ""]
