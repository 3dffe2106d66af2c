"""Run a point: the job that is hit, its restart, and the verdict against a reference without a fault."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy

from fxcomp.commands.demo.shaped_hosts import ShapedHosts
from killing.faults import FILLER, Aim
from killing.kinds import built, directions, steps_of
from killing.life import Life, is_whole
from killing.points import ALLOCATION, BLINK, DISK, LIMIT, LINK, RACING, STOP, Point
from killing.start import Course, Ending, Job, SmallDisk

OFF = 1e-6
"""Largest part of all gradients that may be neither applied nor owed."""

PATIENT_S = 60.0
"""Timeout of jobs without a fault, which a busy machine may delay."""

MAIN = Path(__file__).parent.parent / "kill_sweep.py"

_NAMES_A_RANK = re.compile(r"\branks? \d")


@dataclass(frozen=True)
class Setting:
    """Folder of the sweep's references, checkpoints and logs."""

    folder: Path

    @cache  # noqa: B019
    def reference(self, kind: str, world: int) -> dict[str, Any]:
        """Return what ranks of an undisturbed job ended with; its checkpoints stay."""
        name, by = f"{kind} {world}".replace(" ", "-"), "dcp" if kind == "HSDP" else "files"
        folder = self.folder / "references" / name
        kept = folder / "ends.pickle"
        if not kept.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            forget_costs()
            life = Life(kind, kind in RACING, folder, by, counts=True)
            ends = _undisturbed(life, world, folder / "logs")
            begin_from(folder, folder / "again", by, 0)
            again = _undisturbed(replace(life, folder=folder / "again", resumes=True), world, folder / "logs again")
            for first, second in zip(ends, again, strict=True):
                first["counts"]["loading"] = second["counts"]["loading"]
                assert kind in RACING or first["digest"] == second["digest"], f"{name}: other bits after loading"
            kept.write_bytes(pickle.dumps(ends))
        return {"folder": folder, "ends": pickle.loads(kept.read_bytes())}


def _undisturbed(life: Life, world: int, logs: Path) -> list[dict[str, Any]]:
    course = Job(life, world, logs=logs, timeout_s=PATIENT_S).run()
    bad = [end for end in course.ends if end.how != "finished"]
    assert not bad, f"a job without a fault failed: {life}: {bad[0].text}\n{bad[0].trace}"
    return [end.value for end in course.ends]


def forget_costs() -> None:
    """Remove the costs of earlier jobs from the cache, so that a job measures its own."""
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]) / "fxcomp" / "jobs", ignore_errors=True)


def run(point: Point, setting: Setting) -> dict[str, Any]:
    """Run a point and return its record."""
    begin, tries = time.monotonic(), 0
    while True:
        record = _run(point, setting, tries)
        tries += 1
        if record["hit"] or tries == 3:
            return {**asdict(point), **record, "tries": tries, "seconds": round(time.monotonic() - begin, 1)}


def _run(point: Point, setting: Setting, tries: int) -> dict[str, Any]:
    reference = setting.reference(point.kind, point.world)
    aim = aim_of(point, reference["ends"][point.victim]["counts"], tries)
    folder = setting.folder / "points" / f"{point.number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    saves = folder / "checkpoints"
    with ExitStack() as stack:
        if point.fault == DISK:
            stack.enter_context(SmallDisk(saves))
        saves.mkdir(exist_ok=True)
        if point.resumes:
            begin_from(reference["folder"], saves, point.by, int(point.call * 7))
        forget_costs()
        hosts = stack.enter_context(ShapedHosts(point.world)) if point.fault in LINK else None
        life = Life(point.kind, point.is_linear, saves, point.by, point.resumes, aim)
        course = Job(life, point.world, point.store_at, hosts, folder / "logs").run()
        found: dict[str, Any] = {"function": aim.function, "call": aim.call, **_told(point, course)}
        (saves / FILLER).unlink(missing_ok=True)
        if all(end.how == "finished" for end in course.ends):
            found |= {"restart_s": None, **_verdict(point, reference, course.ends, None)}
        else:
            found |= _restarted(point, life, reference, folder)
    found["lost"] = bool(found["wrong"])
    if not found["wrong"] and not found["anomalies"]:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def aim_of(point: Point, counts: dict[str, dict[str, int]], tries: int = 0) -> Aim:
    """Choose the call by the point's numbers: first a function of the phase, half of the time one near ranks."""
    here = counts[point.phase]
    function, call = ((x + 0.37 * tries) % 1.0 for x in (point.function, point.call))
    room = (point.function * 7919) % 1.0
    if point.fault == ALLOCATION and here.get(ALLOCATION):
        return Aim(point.fault, point.victim, point.phase, ALLOCATION, int(call * here[ALLOCATION]), room)
    names = sorted(name for name in here if name != ALLOCATION)
    near = [name for name in names if name.startswith(("ranks", "site", "runtime", "state", "step", "frontends"))]
    pool = near if near and function < 0.5 else names
    name = pool[int((2 * function % 1.0) * len(pool))]
    return Aim(point.fault, point.victim, point.phase, name, int(call * here[name]), room)


def begin_from(reference: Path, saves: Path, by: str, which: int) -> None:
    """Copy one of the checkpoints of the reference, not the last."""
    whole = [path for path in reference.glob("step-*") if is_whole(path, by)]
    *before, _ = sorted(whole, key=lambda path: int(path.name.removeprefix("step-")))
    chosen = before[which % len(before)]
    shutil.copytree(chosen, saves / chosen.name)


# What ranks told


TORCHS_OWN = {
    "torch/distributed/fsdp/": "a collective of fully_shard",
    "torch/distributed/checkpoint/": "a collective of torch.distributed.checkpoint",
    "torch/nn/parallel/": "a collective of DistributedDataParallel",
    "torch/distributed/device_mesh": "making a device mesh",
}
"""Callers of torch's collectives in which fxcomp has no part."""


def _cause(end: Ending) -> str:
    """Name torch's own call that raised; empty if fxcomp called, or nothing was raised."""
    if end.how == "error" and ("init_process_group(" in end.trace or "TCPStore(" in end.trace):
        return "init_process_group"
    for path in reversed(re.findall(r'File "([^"]+)", line', end.trace)):
        if "/fxcomp/" in path:
            return ""
        if found := next((what for part, what in TORCHS_OWN.items() if part in path), ""):
            return found
    return ""


def _told(point: Point, course: Course) -> dict[str, Any]:
    """Describe how ranks ended after the fault."""
    found = [_end(rank, end, point, course) for rank, end in enumerate(course.ends)]
    anomalies = [f"rank {e['rank']} {why}" for e, end in zip(found, course.ends, strict=True) if (why := _odd(e, end))]
    if course.hit is not None:
        finished = [e["rank"] for e in found if e["how"] == "finished"]
        is_whole = len(finished) == len(found)
        if point.fault == BLINK and not is_whole:
            anomalies.append("the job did not go on")
        if finished and point.fault != BLINK and not (is_whole and point.fault in (LIMIT, DISK)):
            anomalies.append(f"ranks {finished} finished without an error")
    return {"hit": course.hit is not None, "ends": found, "anomalies": anomalies}


def _end(rank: int, end: Ending, point: Point, course: Course) -> dict[str, Any]:
    is_victim = rank == point.victim or (point.fault == DISK and ", in _save" in end.trace)  # all write to the disk
    since = course.went_on if is_victim and point.fault == STOP and course.went_on else course.hit
    return {
        "rank": rank,
        "victim": is_victim,
        "how": end.how,
        "error": end.error,
        "line": end.text.partition("\n")[0][:400],
        "names": bool(_NAMES_A_RANK.search(end.text)),
        "cause": _cause(end),
        "seconds": None if since is None or not end.at else round(end.at - since, 2),
        "exits_s": None if end.exits_s is None else round(end.exits_s, 1),
    }


def _odd(found: dict[str, Any], end: Ending) -> str:
    """Say what is wrong with the end of a rank; empty if nothing is."""
    if end.how == "hangs":
        return f"hangs:\n{end.trace[-4000:]}"
    if end.exits_s is None:
        return f"does not exit after {end.error}"
    if found["victim"]:
        return ""
    if end.how == "died":
        return "died"
    if end.how == "error" and not found["names"] and not found["cause"]:
        return f"names no rank: {end.error}: {found['line']}\n{end.trace[-4000:]}"
    return ""


# The restart


def _restarted(point: Point, life: Life, reference: dict[str, Any], folder: Path) -> dict[str, Any]:
    begin = time.monotonic()
    again = replace(life, aim=None, resumes=True)
    if point.restart_by == "torchrun":
        ends = _by_torchrun(again, point.next_world, folder)
    else:
        ends = Job(again, point.next_world, logs=folder / "logs again", timeout_s=PATIENT_S).run().ends
    seconds = round(time.monotonic() - begin, 1)
    bad = [(rank, end) for rank, end in enumerate(ends) if end.how != "finished"]
    if bad:
        rank, end = bad[0]
        wrong = f"restart failed on rank {rank}: {end.how} {end.error}: {end.text}\n{end.trace[-4000:]}"
        return {"restart_s": seconds, "wrong": [wrong]}
    return {"restart_s": seconds, **_verdict(point, reference, ends, point.next_world)}


def _by_torchrun(life: Life, world: int, folder: Path) -> list[Ending]:
    (folder / "life.pickle").write_bytes(pickle.dumps(life))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        [*command, str(MAIN), "--rank-of", str(folder)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        return [Ending("error", "torchrun", done.stderr[-4000:])]
    files = [folder / f"end-{rank}.pickle" for rank in range(world)]
    return [Ending("finished", value=pickle.loads(file.read_bytes())) for file in files]


# The verdict


def _verdict(point: Point, reference: dict[str, Any], ends: list[Ending], world: int | None) -> dict[str, Any]:
    """Compare the end of a job with its reference, ranks with each other, and gradients with what was applied."""
    values, wrong = [end.value for end in ends], list[str]()
    began = {value["began"] for value in values}
    if len(began) > 1:
        wrong.append(f"ranks began at steps {sorted(began)}")
    digests = [value["digest"] for value in values]
    shards = 2 if point.kind == "HSDP" else 1
    if any(len({*digests[shard::shards]}) > 1 for shard in range(shards)):
        wrong.append("ranks differ")
    is_same_bits = None
    if not point.is_linear:
        is_same_bits = digests == [end["digest"] for end in reference["ends"]]
        if not is_same_bits:
            wrong.append("other bits than without the fault")
    off = None
    if point.is_linear:
        off = _off(point, values, values[0]["began"], world or point.world)
        if not off <= OFF:
            wrong.append(f"{off:.2g} of all gradients are neither applied nor owed")
    followed = [value["is_followed"] for value in values]
    if False in followed:
        wrong.append("the saved plan is not in force")
    return {"began": values[0]["began"], "same_bits": is_same_bits, "off": off,
            "followed": next((each for each in followed if each is not None), None), "wrong": wrong}  # fmt: skip


def _off(point: Point, values: list[dict[str, Any]], began: int, world: int) -> float:
    due, largest = _due(point.kind, began, point.world, world), 0.0
    size = max(float(numpy.abs(each).max()) for each in due.values())
    for name, start in built(True).state_dict().items():
        applied = start.double().numpy() - values[0]["parameters"][name]
        owed = numpy.sum([value["owed"][name] for value in values], axis=0).reshape(applied.shape)
        largest = max(largest, float(numpy.abs(applied + owed - due[name]).max()))
    return largest / size


@lru_cache(maxsize=64)
def _due(kind: str, began: int, world: int, next_world: int) -> dict[str, Any]:
    """Sum the mean gradients of a job: up to a step on some ranks, then on others."""
    micro = 2 if kind == "accumulation" else 1
    due: dict[str, Any] = {}
    for number in range(steps_of(kind) * micro):
        ranks = world if number < began * micro else next_world
        for rank in range(ranks):
            for name, value in directions(number, rank).items():
                due[name] = due.get(name, 0.0) + value.double().numpy() / ranks / micro
    return due


def as_json(record: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(record, default=str))
