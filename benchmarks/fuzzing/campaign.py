"""Run many programs in worker processes that stay, watch over them, and keep a record of how each ended."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fuzzing.draw import draw, theme_of
from fuzzing.follow import FINDINGS, Ranks, follow

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fxcomp.pipeline"])

PROGRAMS_PER_PROCESS = 150
"""Then a fresh process takes over: what a long life leaks is another test's business."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program to run."""

    seed: int
    ranks: int = 1
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a program on all of its ranks."""

    kind: str
    text: str = ""
    steps: int = 0
    where: str = ""
    seconds: float = 0.0
    commit: str = ""
    """Of fxcomp, when it ran."""

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS

    @property
    def likeness(self) -> str:
        """Drop numbers and names from a failure, so that failures of one cause read alike."""
        return f"{self.kind}: " + re.sub(r"[\d.]+|'[^']*'|\(.*", "…", self.text)[:60]

    def shown(self) -> str:
        where = f"\n{self.where}" if self.where else ""
        return f"{self.kind} at step {self.steps} after {self.seconds:.1f} s: {self.text}{where}"


@dataclass
class Record:
    """Results by job, kept in a file of a line each."""

    path: Path | None
    results: dict[Job, Result] = field(default_factory=dict[Job, Result])

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text().splitlines():
                held = json.loads(line)
                self.results[Job(held["seed"], held["ranks"])] = Result(**held["result"])

    def add(self, job: Job, result: Result) -> None:
        self.results[job] = result
        if self.path is None:
            return
        program = str(draw(job.seed, job.ranks).without(job.without))
        self.results[job] = result = replace(result, commit=self.commit)
        line = {"seed": job.seed, "ranks": job.ranks, "result": asdict(result), "program": program}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if result.is_finding:
            print(f"{program}\n  {result.kind} at step {result.steps}: {result.text}", flush=True)

    @cached_property
    def commit(self) -> str:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()

    def findings(self, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if job in self.results and self.results[job].is_finding]

    def counts(self, jobs: Iterable[Job]) -> dict[str, Any]:
        """Count programs by result, and refusals by error."""
        held = [(job, self.results[job]) for job in jobs if job in self.results]
        kinds = Counter(result.kind for _, result in held)
        refused = Counter(result.text.split(":")[0] for _, result in held if result.kind == "refused")
        return {
            "programs": len(held),
            "on_several_ranks": sum(job.ranks > 1 for job, _ in held),
            "on_three_ranks": sum(job.ranks > 2 for job, _ in held),
            "steps": sum(result.steps for _, result in held),
            "process_seconds": round(sum(result.seconds * job.ranks for job, result in held)),
            "torch": torch.__version__,
            "commits": len({result.commit for _, result in held}),
            "kinds": dict(kinds.most_common()),
            "themes": {theme: dict(ended.most_common()) for theme, ended in sorted(_by_theme(held).items())},
            "refused": dict(refused.most_common()),
        }

    def summary(self, jobs: Sequence[Job]) -> str:
        counts = self.counts(jobs)
        several = f"{counts['on_several_ranks']} on several ranks"
        lines = [f"{counts['programs']} programs, {several}, {counts['process_seconds']} s"]
        lines += [f"{number:6} {kind}" for kind, number in counts["kinds"].items()]
        lines += ["refused:"] + [f"{number:6} {text}" for text, number in counts["refused"].items()]
        return "\n".join(lines)


def _by_theme(held: Iterable[tuple[Job, Result]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for job, result in held:
        found.setdefault(theme_of(job.seed, job.ranks) or "whole", Counter())[result.kind] += 1
    return found


# Workers


def run_all(jobs: Sequence[Job], record: Record, workers: int, timeout_s: float) -> Mapping[Job, Result]:
    """Run what the record does not have yet, as many processes at once as there are workers."""
    for ranks in sorted({job.ranks for job in jobs}, reverse=True):
        waiting = [job for job in jobs if job.ranks == ranks and job not in record.results][::-1]
        teams = [Team(ranks, timeout_s) for _ in range(min(max(1, workers // ranks), len(waiting)))]
        try:
            while waiting or any(team.job for team in teams):
                for team in teams:
                    if team.job is None and waiting:
                        team.start(waiting.pop())
                wait([pipe for team in teams for pipe in team.open_pipes], 1.0)
                for team in teams:
                    if (done := team.collect()) is not None:
                        record.add(*done)
        finally:
            for team in teams:
                team.end()
    return record.results


class Team:
    """The processes that run one program together, one a rank; a fresh team follows one that hung or died."""

    def __init__(self, ranks: int, timeout_s: float):
        self.ranks, self.timeout_s = ranks, timeout_s
        self.job: Job | None = None
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.stacks = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  # as long as the team
        self.ran = 0

    def start(self, job: Job) -> None:
        if not self.processes or self.ran >= PROGRAMS_PER_PROCESS:
            self._gather()
        self.job, self.started, self.outcomes = job, time.monotonic(), dict[int, dict[str, Any]]()
        self.ran += 1
        # A fresh store and group for each program: leftovers of one must not reach the next.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if self.ranks > 1 else None
        port = self.store.port if self.store is not None else 0
        for rank, pipe in enumerate(self.pipes):
            pipe.send((job, rank, port, self.timeout_s))

    @property
    def open_pipes(self) -> list[Connection]:
        return [p for rank, p in enumerate(self.pipes) if rank not in self.outcomes] if self.job else []

    def collect(self) -> tuple[Job, Result] | None:
        """The result, once there is one."""
        if self.job is None:
            return None
        for rank, pipe in enumerate(self.pipes):
            if rank not in self.outcomes and pipe.poll():
                try:
                    self.outcomes[rank] = pipe.recv()
                except EOFError:
                    self.outcomes[rank] = {"kind": "died", "text": "the process ended"}
        seconds = time.monotonic() - self.started
        if len(self.outcomes) < self.ranks and seconds < self.timeout_s + 5:
            return None
        job, result = self.job, self._judged(seconds)
        self.job = None
        if result.kind in ("hung", "died") or (self.ranks > 1 and not self._ended_alike()):
            self.end()
        return job, result

    def _ended_alike(self) -> bool:
        """Return whether all ranks came to the same end in order, so that they can go on together."""
        kinds = {outcome["kind"] for outcome in self.outcomes.values()}
        return len(self.outcomes) == self.ranks and kinds in ({"equal"}, {"refused"}, {"raised"})

    def _judged(self, seconds: float) -> Result:
        """All ranks' outcomes as one: the worst counts."""
        outcomes = [self.outcomes.get(rank) for rank in range(self.ranks)]
        if None in outcomes:
            self.stacks.seek(0)
            return Result("hung", f"rank {outcomes.index(None)} has not come back", 0, self.stacks.read(), seconds)
        order = (*FINDINGS, "refused", "raised", "equal")
        worst = min((outcome for outcome in outcomes if outcome), key=lambda o: order.index(o["kind"]))
        # A rank that raised may leave the others with our error for it; of refusals, the cause counts.
        if worst["kind"] == "refused":
            worst = min((o for o in outcomes if o), key=lambda o: (o["kind"] != "refused", "PeerFailed" in o["text"]))
        return Result(seconds=round(seconds, 2), **worst)

    def _gather(self) -> None:
        self.end()
        self.ran = 0
        for _ in range(self.ranks):
            mine, theirs = _PROCESSES.Pipe()
            process = _PROCESSES.Process(target=_work, args=(theirs, self.stacks.name), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


def _work(pipe: Connection, stacks: str) -> None:
    """Run programs until nobody asks for another one."""
    with Path(stacks).open("a") as file:
        while True:
            try:
                job, rank, port, timeout_s = pipe.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(timeout_s, file=file)
            pipe.send(_run(job, rank, port).to_json())
            faulthandler.cancel_dump_traceback_later()


def _run(job: Job, rank: int, port: int) -> Any:
    program = draw(job.seed, job.ranks).without(job.without)
    if job.ranks == 1:
        return follow(program)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=job.ranks, timeout=timedelta(seconds=15)
    )
    outcome = follow(program, Ranks(store, rank, job.ranks))
    if outcome.kind == "equal":
        dist.barrier()
    dist.destroy_process_group()
    return outcome


# Shrinking


def shrink(job: Job, result: Result, timeout_s: float) -> tuple[Job, Result]:
    """Leave out features, one after the other, as long as it fails in the same way."""
    team_of = Record(None)
    for feature in draw(job.seed, job.ranks).without(job.without).features:
        smaller = Job(job.seed, job.ranks, (*job.without, feature.slot))
        found = run_all([smaller], team_of, 1, timeout_s)[smaller]
        if found.is_finding and found.likeness == result.likeness:
            job, result = smaller, found
    return job, result


# The page

_BEGIN, _END = "<!-- numbers: begin -->", "<!-- numbers: end -->"


def write_page(page: Path, record: Record, jobs: Sequence[Job]) -> None:
    """Put a record's numbers between the marks of a page, and beside it as JSON."""
    counts = record.counts(jobs)
    kinds = list(counts["kinds"])
    rows = [
        f"| {theme} | {sum(ended.values())} | " + " | ".join(str(ended.get(kind, 0)) for kind in kinds) + " |"
        for theme, ended in (*counts["themes"].items(), ("all", counts["kinds"]))
    ]
    refused = [f"| `{text}` | {number} |" for text, number in counts["refused"].items()]
    said = (
        f"{counts['programs']} programs, {counts['on_several_ranks']} of them on two or three ranks,"
        f" {counts['steps']} steps, {counts['process_seconds']} s of processes' time, torch {counts['torch']}."
    )
    table = [f"| about | programs | {' | '.join(kinds)} |", "|---|---:|" + "---:|" * len(kinds), *rows, ""]
    table += ["| refused with | programs |", "|---|---:|", *refused]
    before, _, rest = page.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text("\n".join([f"{before}{_BEGIN}", said, "", *table, f"{_END}{after}"]))
    page.with_suffix(".json").write_text(json.dumps(counts, indent=1) + "\n")
