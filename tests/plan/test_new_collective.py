"""A made-up collective, planted in the files that docs/architecture.md names, is compiled, priced and laid out."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PLANTED = {
    "plan/kinds.py": {
        '    POINT_TO_POINT = "point_to_point"\n': '    POINT_TO_POINT = "point_to_point"\n    RELAY = "relay"\n',
        "CollectiveKind.ALL_TO_ALL)\n\n": "CollectiveKind.ALL_TO_ALL, CollectiveKind.RELAY)\n\n",
        "_JOINED_BY = {\n": "_JOINED_BY = {\n    CollectiveKind.RELAY: CollectiveKind.ALL_GATHER,\n",
    },
    "cost/collectives.py": {
        "    _K.GATHER: {": "    _K.RELAY: {_A.DIRECT: Formula(_one, _others, _share, _P.PAIRS)},\n    _K.GATHER: {",
        "        _K.GATHER: (_A.DIRECT,),\n": "        _K.GATHER: (_A.DIRECT,),\n        _K.RELAY: (_A.DIRECT,),\n",
    },
    "runtime/transfers.py": {'    "gather": ': '    "relay": Pattern.ALL_TO_ALL,\n    "gather": '},
}
"""By file: texts, and what stands in their place."""

USE = """
from helpers.graphs import TWO, linear_step, one_bucket
from helpers.workloads import COSTS
from fxcomp.graph.edit import is_collective
from fxcomp.pipeline import Compiler
from helpers.strategy_space import SHARDED
from fxcomp.report.wire_arithmetic import sent_by

plan = one_bucket("compress(int8)@gpu > relay@world > decompress@gpu > all_gather@world")
gm = Compiler(TWO).rewrite(linear_step(), plan, COSTS)
print([str(n.target) for n in gm.graph.nodes if is_collective(n)])
print([span.task.name for span in Compiler(TWO).predicted(gm, COSTS).spans if "relay" in span.task.name])
(bucket,) = plan.buckets
shapes = {name: (size,) for name, size in zip(bucket.names, bucket.sizes)}
print([line.send.kind.value for line in sent_by(bucket, TWO, shapes)])
print("relay" in [kind.value for kind in SHARDED])
"""


def test_a_collective_takes_its_name_its_price_and_its_pattern(tmp_path: Path):
    shutil.copytree(ROOT / "fxcomp", tmp_path / "fxcomp", ignore=shutil.ignore_patterns("__pycache__"))
    for name, texts in PLANTED.items():
        path = tmp_path / "fxcomp" / name
        source = path.read_text()
        for text, instead in texts.items():
            assert text in source, f"{name} has no {text!r}"
            source = source.replace(text, instead)
        path.write_text(source)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}", "PATH": "", "HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "['fxcomp.relay.default', 'fxcomp.all_gather.default']",
        "['start relay_0_int8', 'relay_0_int8']",
        "['relay', 'all_gather']",
        "True",
    ]
