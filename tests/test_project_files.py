"""Files about the project agree with it: versions, supported Pythons and torches, workflows, issue forms."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fxcomp
from fxcomp.cost import table as cost_table
from fxcomp.error_tables import table as error_table
from fxcomp.state import saved_state

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORGE = sorted((ROOT / ".github").rglob("*.yml"))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def commands_of(workflow: Any) -> str:
    return "\n".join(step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"])


def test_the_workflow_runs_every_python_and_torch_that_is_supported():
    matrix = read(".github/workflows/tests.yml")["jobs"]["fast"]["strategy"]["matrix"]
    classified = [text.removeprefix("Programming Language :: Python :: ") for text in PROJECT["classifiers"]]
    assert matrix["python"] == [text for text in classified if re.fullmatch(r"3\.\d+", text)]
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    [torch] = [text.removeprefix("torch>=") for text in PROJECT["dependencies"] if text.startswith("torch")]
    assert matrix["torch"][0].startswith(f"{torch}.")
    [developed_with] = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert matrix["torch"][-1] == developed_with
    told = (ROOT / "docs" / "versioning.md").read_text()
    assert all(version.rpartition(".")[0] in told for version in matrix["torch"])


def test_workflows_call_what_there_is():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        commands = commands_of(read(str(path.relative_to(ROOT))))
        assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= set(targets)
    [built] = [job for name, job in read(".github/workflows/wheels.yml")["jobs"].items() if name == "wheel"]
    assert "manylinux" in built["container"]
    assert read(".github/workflows/wheels.yml")["env"]["FXCOMP_REQUIRE_KERNELS"] == "1"


def test_an_issue_form_asks_for_the_report_as_data():
    forms = {path.stem: read(str(path.relative_to(ROOT))) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    problem = {entry["id"]: entry for entry in forms["problem"]["body"]}
    assert "fxcomp explain train.py:job --json" in problem["report"]["attributes"]["description"]
    assert problem["report"]["validations"]["required"]
    assert "fxcomp.__version__" in problem["versions"]["attributes"]["placeholder"]
    assert {"problem", "wish", "config"} == forms.keys()


def test_the_citation_and_the_changelog_are_of_this_version():
    assert str(read("CITATION.cff")["version"]) == fxcomp.__version__
    assert read("CITATION.cff")["license"] == PROJECT["license"]
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert any(head.startswith(fxcomp.__version__) for head in heads)


def test_versions_of_files_are_those_that_are_told():
    told = (ROOT / "docs" / "versioning.md").read_text()
    assert f"| saved state, checkpoint | {saved_state.VERSION} | {saved_state.VERSION} |" in told
    assert f"| cost table | {cost_table.VERSION} | {cost_table.VERSION} |" in told
    assert f"| error table | {error_table.VERSION} | {error_table.VERSION} |" in told


def test_links_and_addresses_are_of_one_place():
    home = PROJECT["urls"]["Source"]
    texts = [path.read_text() for path in (*FORGE, ROOT / "SECURITY.md", ROOT / "CITATION.cff")]
    found = {url for text in texts for url in re.findall(r"https://github\.com/[\w.-]+/[\w.-]+", text)}
    assert found == {home}
    assert all(url.startswith(home) for url in PROJECT["urls"].values())
