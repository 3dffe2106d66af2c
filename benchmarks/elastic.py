"""Lose and add a rank in a running job under torchrun, 4 -> 3 -> 4 ranks, and time how long it takes to go on.

    python benchmarks/elastic.py --json elastic.json
    python benchmarks/elastic.py --cases "kill, short waits"

Four agents of torchrun (`--nnodes 3:4`, c10d rendezvous) on this machine start a rank each, which runs
examples/recipes/plain.py with a loss whose gradients are drawn from the step and the rank. One agent and its rank are
killed, or stopped as if their host were gone. The others begin again with three ranks from the newest checkpoint; then
an agent joins, and all begin again with four.

    notices     from the kill to the error of each rank that survives
    three       from the kill to the end of the first step with three ranks
    four        from the start of the new agent to the end of the first step with four ranks
    lost steps  steps that were repeated, because no checkpoint had them: after the kill, and after the joining

The exit status is 1 if ranks do not end with equal parameters, or if the parameters and the residuals do not add up to
all gradients of the steps that count.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from records import Records, options, table
from shaped import ends_well, is_rank
from torch import Tensor, nn

import fxcomp

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent / "examples" / "recipes"

RANKS, LEAST = 4, 3
STEP_S, SAVE_EVERY = 0.05, 10
WAIT_S = 180.0
"""Longest wait for each event."""
TOLERANCE = 1e-5
"""Of the largest sum of gradients; sums are in f32."""


@dataclass(frozen=True)
class Case:
    sign: signal.Signals
    rendezvous: str
    """Value of `--rdzv-conf`."""
    timeout_s: float = 1800.0
    """Timeout of the process group; gloo's default."""
    plan: str | None = "topk(0.05)"
    """None: fxcomp's defaults."""
    monitor_s: float = 0.1
    """Time between two looks of an agent at its rank and at agents that wait; torchrun's default."""


SHORT = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
CASES = {
    "kill": Case(signal.SIGKILL, ""),
    "kill, short waits": Case(signal.SIGKILL, SHORT),
    "kill, short waits, fxcomp's plan": Case(signal.SIGKILL, SHORT, plan=None),
    "kill, short waits, rare looks": Case(signal.SIGKILL, SHORT, monitor_s=3.0),
    "stop, short waits": Case(signal.SIGSTOP, SHORT, timeout_s=10.0),
}

Event = Mapping[str, Any]


# A rank


def drawn(step: int, rank: int, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def linear(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a loss whose gradients are the batch, whatever the parameters."""
    return torch.stack([(batch[name] * p).sum() for name, p in model.named_parameters()]).sum()


def train(folder: Path, steps: int, case: Case) -> None:
    sys.path.insert(0, str(RECIPES))
    import plain  # pyright: ignore[reportMissingImports]

    agent = os.environ["AGENT"]
    log = (folder / f"agent-{agent}.jsonl").open("a", buffering=1)

    def tell(event: str, **facts: object) -> None:
        log.write(json.dumps({"event": event, "at": time.time(), "agent": agent, "pid": os.getpid(), **facts}) + "\n")

    shapes: dict[str, torch.Size] = {}

    def compile_step(model: nn.Module, *arguments: Any) -> fxcomp.CompiledStep:
        shapes.update({name: p.shape for name, p in model.named_parameters()})
        given = {} if case.plan is None else {"compress": case.plan}
        loss_fn, optimizer, _ = arguments
        step = compiled(model, loss_fn, optimizer, drawn(0, dist.get_rank(), shapes), **given)
        made.append(step)
        if dist.get_rank() == 0 and not (folder / "start").exists():
            torch.save(model.state_dict(), folder / "start")
        return step

    def batch_at(index: int, rank: int) -> dict[str, Tensor]:
        if made:
            tell("begins step", step=index, ranks=dist.get_world_size(), rank=rank)
            time.sleep(STEP_S)
        return drawn(index, rank, shapes)

    made: list[fxcomp.CompiledStep] = []
    compiled, fxcomp.compile_step = fxcomp.compile_step, compile_step  # pyright: ignore[reportAttributeAccessIssue]
    plain.loss_fn, plain.batch_at, plain.SAVE_EVERY = linear, batch_at, SAVE_EVERY
    torch.optim.SGD = lambda parameters, **_: sgd(parameters, lr=1.0)  # pyright: ignore
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=case.timeout_s))
        tell("joined", ranks=dist.get_world_size(), rank=dist.get_rank())
        model = plain.main(folder, steps)
        if made[0].steps == steps:
            state = made[0].state_dict()
            end = {"model": model.state_dict(), "residuals": state["residuals"], "ranks": dist.get_world_size()}
            torch.save(end, folder / f"end-{dist.get_rank()}")
        tell("ended", steps=made[0].steps)
    except SystemExit:
        tell("stopped")
        raise
    except BaseException as error:
        tell("failed", error=f"{type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()


sgd = torch.optim.SGD


# The parent


class Job:
    """Agents on this machine, and the events of their ranks."""

    def __init__(self, folder: Path, steps: int, name: str, stack: ExitStack) -> None:
        self.folder, self._stack, self._port = folder, stack, free_port()
        self._steps, self._name = steps, name
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, agent: int) -> None:
        case = CASES[self._name]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{LEAST}:{RANKS}"]
        command += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--local-addr", "127.0.0.1"]
        command += ["--monitor-interval", str(case.monitor_s)]
        command += ["--rdzv-conf", case.rendezvous] if case.rendezvous else []
        command += [__file__, "--rank-in", str(self.folder), "--steps", str(self._steps), "--cases", self._name]
        own = {"AGENT": str(agent), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        output = self._stack.enter_context((self.folder / f"agent-{agent}.out").open("ab"))
        self.agents[agent] = subprocess.Popen(
            command, env={**os.environ, **own}, stdout=output, stderr=output, start_new_session=True
        )

    def signal(self, agent: int, sign: signal.Signals) -> None:
        """Send a signal to an agent and to its rank, which has a session of its own."""
        pids = {int(each["pid"]) for each in self.events() if each["agent"] == str(agent)}
        for group in (self.agents[agent].pid, *pids):
            with suppress(ProcessLookupError):
                if group == self.agents[agent].pid or Path(f"/proc/{group}/stat").exists():
                    os.killpg(group, sign)

    def end(self) -> None:
        for agent, process in self.agents.items():
            if process.poll() is None:
                self.signal(agent, signal.SIGKILL)
            process.wait()

    def events(self) -> list[Event]:
        lines = [line for path in self.folder.glob("agent-*.jsonl") for line in path.read_text().splitlines()]
        return sorted(map(json.loads, lines), key=lambda event: event["at"])

    def wait(self, what: str, found: Callable[[list[Event]], Any]) -> Any:
        until = time.monotonic() + WAIT_S
        while not (result := found(self.events())):
            ended = {agent: process.poll() for agent, process in self.agents.items()}
            if time.monotonic() > until or all(code is not None for code in ended.values()):
                raise RuntimeError(f"{what} did not happen; exit codes {ended}\n{self.tails()}")
            time.sleep(0.02)
        return result

    def tails(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in sorted(self.folder.glob("agent-*.out")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def after(events: list[Event], at: float, **facts: object) -> list[Event]:
    """Return events after a time with the given facts."""
    return [each for each in events if each["at"] > at and all(each.get(name) == v for name, v in facts.items())]


def elastic(name: str, steps: int, folder: Path) -> dict[str, Any]:
    case, lost = CASES[name], RANKS - 1
    with ExitStack() as stack:
        job = Job(folder, steps, name, stack)
        stack.callback(job.end)
        for agent in range(RANKS):
            job.start(agent)
            time.sleep(0.5 if agent == 0 else 0.0)  # the first keeps the store of the rendezvous
        begins = partial(after, event="begins step")
        job.wait("training with four ranks", lambda events: begins(events, 0.0, step=2 * SAVE_EVERY + 5, ranks=RANKS))
        killed = time.time()
        job.signal(lost, case.sign)
        job.wait("a step with three ranks", lambda events: begins(events, killed, ranks=LEAST)[LEAST:])
        enough = begins(job.events(), killed, ranks=LEAST)[0]["step"] + 2 * SAVE_EVERY + 5
        job.wait("training with three ranks", lambda events: begins(events, killed, ranks=LEAST, step=enough))
        job.signal(lost, signal.SIGKILL)
        joined = time.time()
        job.start(RANKS)
        job.wait("the end", lambda events: after(events, joined, event="ended", steps=steps)[RANKS - 1 :])
        for agent, process in job.agents.items():
            if agent != lost and process.wait(60) != 0:
                raise RuntimeError(f"agent {agent} ended with {process.returncode}\n{job.tails()}")
        events = job.events()
    before = [each["step"] for each in begins(events, 0.0) if each["at"] < killed]
    with_three, with_four = begins(events, killed, ranks=LEAST), begins(events, joined, ranks=RANKS)
    errors = [each for each in after(events, killed, event="failed") if each["at"] < with_three[0]["at"]]
    return {
        "case": name,
        "rendezvous": case.rendezvous,
        "timeout_s": case.timeout_s,
        "monitor_s": case.monitor_s,
        "plan": case.plan,
        "steps": steps,
        "notices_s": [round(each["at"] - killed, 2) for each in errors],
        "errors": [each["error"] for each in errors],
        "joined_three_s": round(after(events, killed, event="joined", ranks=LEAST)[0]["at"] - killed, 2),
        "three_s": round(with_three[LEAST]["at"] - killed, 2),
        "last_of_three_s": round(with_three[-1]["at"] - joined, 2),
        "joined_four_s": round(after(events, joined, event="joined", ranks=RANKS)[0]["at"] - joined, 2),
        "four_s": round(with_four[RANKS]["at"] - joined, 2),
        "failed_on_joining": [each["error"] for each in after(events, joined, event="failed")],
        "lost_steps": [max(before) + 1 - with_three[0]["step"], with_three[-1]["step"] + 1 - with_four[0]["step"]],
        **sums(folder, events, steps),
    }


def sums(folder: Path, events: list[Event], steps: int) -> dict[str, Any]:
    """Return whether replicas are equal, and the largest value of gradients that are neither applied nor owed."""
    start, ends = torch.load(folder / "start"), [torch.load(path) for path in sorted(folder.glob("end-*"))]
    shapes = {name: value.shape for name, value in start.items()}
    ranks_at = {each["step"]: each["ranks"] for each in events if each["event"] == "begins step"}  # the last one counts
    due = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for step in range(steps):
        for rank in range(ranks_at[step]):
            for name, gradient in drawn(step, rank, shapes).items():
                due[name] += gradient.double() / ranks_at[step]
    missing, largest = 0.0, 0.0
    for name, total in due.items():
        owed = torch.zeros(total.numel(), dtype=torch.float64)
        for end in ends:
            for piece in end["residuals"].get(name, ()):
                owed[piece["start"] : piece["start"] + piece["values"].numel()] += piece["values"].double() / len(ends)
        applied = start[name].double() - ends[0]["model"][name].double()
        missing = max(missing, (total - applied - owed.view_as(total)).abs().max().item())
        largest = max(largest, total.abs().max().item())
    equal = all(torch.equal(value, end["model"][name]) for end in ends for name, value in ends[0]["model"].items())
    return {"equal": equal, "ends": len(ends), "missing": missing / largest, "owes": any(e["residuals"] for e in ends)}


def rows(found: list[dict[str, Any]]) -> Iterator[list[object]]:
    for each in found:
        notices = f"{min(each['notices_s']):g} to {max(each['notices_s']):g}" if each["notices_s"] else "none"
        lost = " and ".join(map(str, each["lost_steps"]))
        yield [each["case"], notices, each["three_s"], each["four_s"], lost, each["equal"], f"{each['missing']:.1e}"]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--cases", default=";".join(CASES), help="names, separated by ;")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rank-in", type=Path, metavar="FOLDER", help="run a rank (started by an agent)")
    arguments = parser.parse_args()
    names = arguments.cases.split(";")
    if is_rank():
        train(arguments.rank_in, arguments.steps, CASES[names[0]])
        return 0
    kept = Records(arguments.json, ranks=RANKS)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            kept.add(elastic(name, arguments.steps, Path(folder)))
        print(json.dumps(kept.found[-1], indent=1), flush=True)
    head = "case | notices, s | three, s > | four, s > | lost steps | equal | missing >"
    print(table(head, rows(kept.found)))
    wrong = [each for each in kept.found if not each["equal"] or each["missing"] > TOLERANCE or each["ends"] != RANKS]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(ends_well(main))
