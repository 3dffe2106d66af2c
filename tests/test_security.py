"""Each line of SECURITY.md, about files, the environment and other ranks, names a test that shows it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from helpers.graphs import linear_step

import fxcomp
from fxcomp import compat
from fxcomp.codegen.load import load
from fxcomp.errors import BadPlan
from fxcomp.frontends.job import load_job
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

ROOT = Path(__file__).parent.parent
PACKAGE = Path(fxcomp.__file__).parent


def trees(pattern: str) -> dict[str, ast.Module]:
    """Parse the package's modules whose text has a pattern."""
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    return {place: ast.parse(text) for place, text in texts.items() if re.search(pattern, text)}


def test_each_line_names_tests_that_exist():
    lines = (ROOT / "SECURITY.md").read_text().partition("## Effects of inputs")[2]
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    known = {name for text in texts for name in re.findall(r"def (test_\w+)", text)}
    items = re.findall(r"(?ms)^- (.*?)(?=\n\n|\n- |\Z)", lines)
    assert len(items) > 10
    for item in items:
        named = re.findall(r"`(test_\w+)`", item)
        assert named, item
        assert not {*named} - known, item


def test_a_forged_file_is_read(tmp_path: Path):
    path = tmp_path / "plan.json"
    Plan((Bucket(("a",), (4,), DENSE),)).save(path)
    data = compat.read_json(path)
    data["buckets"][0]["strategy"] = "compress(sign)@gpu > all_gather@world > decompress@gpu"
    path.write_text(json.dumps(compat.sealed(data)))
    assert "sign" in str(Plan.load(path))


def test_a_plan_imports_installed_plugins_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hostile.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "plan.json"
    for name in ("hostile", "hostile.Hostile", "hostile:Hostile", "hostile()", "__import__('hostile')"):
        text = f"compress({name})@gpu > all_gather@world > decompress@gpu"
        path.write_text(json.dumps({"version": 1, "buckets": [{"names": ["a"], "sizes": [4], "strategy": text}]}))
        with pytest.raises(BadPlan, match="cannot read the plan"):
            Plan.load(path)


def test_a_job_file_is_run(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text("raise SystemError('this file runs')")
    with pytest.raises(SystemError, match="this file runs"):
        load_job(str(path))


def test_a_forged_source_in_the_cache_is_not_run(tmp_path: Path):
    source = "def step():\n    return 1\n"
    path = Path(load(source, linear_step(), tmp_path).__file__)
    path.write_text("raise SystemExit")
    assert load(source, linear_step(), tmp_path).step() == 1
    assert path.read_text() == source


VARIABLES = {
    "XDG_CACHE_HOME",
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    *("GLOO_SOCKET_IFNAME", "TORCHDYNAMO_DISABLE", "TORCH_CUDNN_SDPA_DEPRIORITIZED"),
    *("FXCOMP_PROGRESS", "NO_COLOR", "TERM", "COLUMNS", "PATH"),
}


def test_variables_that_are_read_are_known():
    found = set[str]()
    for tree in trees("env").values():
        for node in ast.walk(tree):
            match node:
                case ast.Subscript(value=where, slice=ast.Constant(value=str(name))):
                    pass
                case ast.Call(func=ast.Attribute(value=where, attr="get"), args=[ast.Constant(value=str(name)), *_]):
                    pass
                case ast.Compare(left=ast.Constant(value=str(name)), comparators=[where]):
                    pass
                case ast.Attribute(value=where, attr="getenv" as name):
                    where = ast.Name("environment")
                case _:
                    continue
            if ast.unparse(where) in ("os.environ", "environment"):
                found.add(name)
    assert found | {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} == VARIABLES


OBJECTS = re.compile(
    r"(.*\.)?(\w+_object|\w+_object_list)|(pickle|dill|marshal|joblib)\.\w*load\w*|.*Unpickler|eval|shelve\.open"
)
OURS = ("_object", "self._follow_object")

UNPICKLED = {
    "compat/answers.py": {"eval"},  # of an expression that torch made
    "state/checkpoint_folder.py": {"_Unpickler"},  # to plain values alone
    "commands/bisect/rank.py": {"pickle.loads"},  # between processes of one command, in a private folder
}


def test_no_call_receives_pickled_objects():
    found: dict[str, set[str]] = {}
    for place, tree in trees("_object|load|Unpickler|eval|shelve").items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if OBJECTS.fullmatch(name) and name not in OURS:
                found.setdefault(place, set()).add(name)
            if name in ("torch.load", "load") and any(each.arg == "map_location" for each in call.keywords):
                assert "weights_only=True" in ast.unparse(call), place
    assert found == UNPICKLED
