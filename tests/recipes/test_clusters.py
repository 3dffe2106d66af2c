"""Scripts for schedulers run without these: processes here, with the variables that a scheduler sets."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.recipes import RECIPES, ROOT

import fxcomp

SRUN = """
import os, pathlib, signal, subprocess, sys

pathlib.Path("srun.pid").write_text(str(os.getpid()))
command = [word for word in sys.argv[1:] if not word.startswith("--")]
tasks = int(os.environ["SLURM_NTASKS"])
ranks = [
    subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(k), "SLURM_LOCALID": str(k % 2),
                                   "SLURM_STEP_NUM_TASKS": str(tasks)})
    for k in range(tasks)
]
signal.signal(signal.SIGTERM, lambda *_: [rank.send_signal(signal.SIGTERM) for rank in ranks])
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
"""Starts all tasks here, passes a signal on, and ends with the highest status, as srun does."""

SCONTROL = """
import sys

if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost\\nanother-host")
else:
    print("scontrol", *sys.argv[1:], flush=True)
"""


def place(folder: Path, **programs: str) -> dict[str, str]:
    """Put programs on the path; return the environment that finds them, this Python's, and fxcomp."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o755)
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RECIPES": str(RECIPES)}


FXCOMP = "import sys\nfrom fxcomp.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"


def whole(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/.metadata"))


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.05)


@pytest.mark.parametrize("script", sorted(path.name for path in RECIPES.glob("*.sh")))
def test_scripts_parse(script: str):
    subprocess.run(["bash", "-n", str(RECIPES / script)], check=True)


@pytest.mark.slow
def test_a_slurm_job_calibrates_once_saves_when_preempted_asks_to_be_requeued_and_goes_on(tmp_path: Path):
    environment = place(tmp_path / "bin", srun=SRUN, scontrol=SCONTROL, fxcomp=FXCOMP)
    environment |= {
        "SLURM_JOB_ID": str(random.randrange(20_000)), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "2",
        "SLURM_JOB_PARTITION": "fast", "SLURM_SUBMIT_DIR": str(ROOT), "STEPS": "100000",
    }  # fmt: skip
    command = ["bash", str(RECIPES / "slurm.sh"), "saved"]
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    wait_for(tmp_path / "saved" / "step-50" / ".metadata", first)
    # what --signal=TERM@120 sends to the step
    os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
    output, _ = first.communicate(timeout=200)
    assert first.returncode == 75, output
    assert f"scontrol requeue {environment['SLURM_JOB_ID']}" in output
    last = whole(tmp_path / "saved")[-1]
    costs = tmp_path / "costs-fast-2.json"
    assert fxcomp.CostTable.read(costs) is not None
    measured = costs.stat().st_mtime_ns
    environment["STEPS"] = str(last + 3)
    second = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert second.returncode == 0, second.stdout + second.stderr
    assert costs.stat().st_mtime_ns == measured, "it was measured once"
    assert whole(tmp_path / "saved")[-1] == last + 3
    assert "requeue" not in second.stdout


@pytest.mark.slow
def test_calibrate_under_srun_without_the_variables_is_refused(tmp_path: Path):
    """Each task would measure alone, and all would write one file."""
    environment = place(tmp_path / "bin", srun=SRUN, fxcomp=FXCOMP) | {"SLURM_NTASKS": "2"}
    command = ["srun", "fxcomp", "calibrate", "-o", str(tmp_path / "costs.json")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=100)
    assert ran.returncode == 2, ran.stderr
    assert "srun has started 2 tasks without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in ran.stderr
    assert not (tmp_path / "costs.json").exists()


def test_a_rank_that_has_joined_no_group_is_told_that_it_works_for_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.warns(UserWarning, match=r"a launcher has started 8 processes, but .*init_process_group"):
        alone()


def alone() -> Any:
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fxcomp.compile_step(model, lambda model, batch: model(batch).sum(), optimizer, torch.ones(4, 3))


# Kubernetes, torchx


def objects() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return {each["kind"]: each for each in yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())}


def test_the_manifest_gives_pods_the_names_that_ranks_meet_at():
    service, job = objects()["Service"], objects()["Job"]
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["RANKS_PER_NODE"])
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never", "what a podFailurePolicy asks for"


@pytest.mark.slow
def test_the_pods_commands_meet_calibrate_and_train(tmp_path: Path):
    [container] = objects()["Job"]["spec"]["template"]["spec"]["containers"]
    environment = place(tmp_path / "bin", fxcomp=FXCOMP)
    environment |= {each["name"]: each["value"] for each in container["env"]}
    environment |= {
        "RANKS_PER_NODE": "1", "MASTER_ADDR": "localhost", "FOLDER": str(tmp_path), "RECIPES": str(RECIPES),
        "MASTER_PORT": str(random.randrange(20_000, 30_000)),
    }  # fmt: skip
    pods = [
        subprocess.Popen(
            container["command"], env={**environment, "JOB_COMPLETION_INDEX": str(index)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for index in range(2)
    ]  # fmt: skip
    for pod in pods:
        output, _ = pod.communicate(timeout=300)
        assert pod.returncode == 0, output
    assert (tmp_path / "costs.json").exists()
    assert whole(tmp_path)[-1] == 200


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("torchx", path=str(Path(sys.executable).parent)) is None, reason="no torchx")
def test_torchx_runs_the_script_here(tmp_path: Path):
    page = (ROOT / "docs" / "recipes" / "clusters.md").read_text()
    [shown] = [line.strip() for line in page.splitlines() if line.strip().startswith("torchx run -s local_cwd")]
    environment = place(tmp_path / "bin")
    command = shown.replace("checkpoints", str(tmp_path / "saved"))
    ran = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert whole(tmp_path / "saved")[-1] == 200
