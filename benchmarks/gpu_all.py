"""Check and time everything that needs a GPU in one command; run it first on a GPU machine.

    python benchmarks/gpu_all.py --json gpu.json --trace traces
    python benchmarks/gpu_all.py --json gpu.json --parts checks        # or: kernels, steps
    python benchmarks/gpu_all.py --json gpu.json --only int8           # only checks with this in their name

It runs from a checkout, which need not be installed, and builds missing C++ kernels. It takes less than ten minutes.
Records are saved within seconds, so an interrupted run keeps them.

    checks    in parallel processes: parity of compiled and eager training on one rank, by scripts and on two ranks
              that share the GPU over gloo, or over NCCL if possible (`gpu_parity.py`); bits of every compressor
              (`gpu_kernels.py`). Each check prints a line and adds a record `{check, ok, detail}`.
    kernels   speed of every compressor relative to a copy, alone on the GPU
    steps     whole steps of fxcomp, DDP and its hooks, alone on the GPU, with traces (`gpu_steps.py`)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
from gpu_kernels import bits, speeds
from gpu_parity import DEVICE, one_gpu, rank_main, scripts, two_ranks
from records import Records, Results, options, read

from fxcomp.compressors import kernels

SHARES = 6
"""Processes that check compressors; compiling kernels on a processor takes longest."""
CHECKS = ("two ranks, nccl", "two ranks, gloo", "steps", "scripts", *(f"bits {i}" for i in range(SHARES)))
PARTS = ("checks", "kernels", "steps")
LIMIT_S = {"checks": 180.0, "kernels": 120.0, "steps": 220.0}


def run_part(name: str, path: Path, only: str) -> None:
    results = Results(path, only)
    kind, _, rest = name.partition(" ")
    if kind == "bits":
        bits(results, DEVICE, (int(rest), SHARES))
    elif kind == "kernels":
        speeds(results, DEVICE)
    elif kind == "scripts":
        scripts(results)
    elif kind == "two":
        two_ranks(results, rest.removeprefix("ranks, "), of_ranks(path))
    else:
        one_gpu(results)


def of_ranks(path: Path) -> Path:
    return path.with_suffix(".ranks.json")


def built_kernels() -> tuple[bool, str]:
    """Build missing C++ kernels. Return success and details."""
    if kernels.available():
        return True, "there already"
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or ["built"])[-1]
    return done.returncode == 0, f"{last}; the processes that are started from here on use them"


class Parts:
    """Parts that run as separate processes and share one record file."""

    def __init__(self, folder: Path, kept: Records, arguments: argparse.Namespace) -> None:
        self.folder, self.kept, self.arguments = folder, kept, arguments
        self.first = list(kept.found)
        self.files: list[Path] = []

    def run(self, names: tuple[str, ...], limit_s: float) -> None:
        """Run parts in parallel until all end or time is up."""
        deadline = time.monotonic() + limit_s
        running = {name: subprocess.Popen(self.command(name), cwd=ROOT) for name in names}
        while running:
            time.sleep(1)
            self.collect()
            for name, process in list(running.items()):
                if process.poll() is None and time.monotonic() > deadline:
                    process.kill()
                    self.first.append({"check": name, "ok": False, "detail": f"took more than {limit_s:g} s"})
                if process.poll() is not None:
                    del running[name]
                    if process.returncode:
                        self.first.append({"check": name, "ok": False, "detail": f"ended with {process.returncode}"})
        self.collect()

    def command(self, name: str) -> list[str]:
        path = self.folder / f"{name.replace(' ', '_')}.json"
        self.files += [path, of_ranks(path)]
        if name == "whole steps":
            traces = ["--trace", str(self.arguments.trace)] if self.arguments.trace else []
            others = ["--device", str(DEVICE), "--json", str(path), *self.arguments.steps.split()]
            return [sys.executable, str(ROOT / "benchmarks/gpu_steps.py"), *others, *traces]
        return [sys.executable, __file__, "--part", name, "--json", str(path), "--only", self.arguments.only]

    def collect(self) -> None:
        self.kept.found = list(self.first)
        self.kept.add(*(record for path in self.files if path.exists() for record in read(path)))


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="run only checks with this in their name")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="keep profiles of steps here")
    parser.add_argument("--steps", default="", metavar="OPTIONS", help="for gpu_steps.py")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, where there is no GPU")
    parser.add_argument("--rank", choices=("gloo", "nccl"), help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.rank, arguments.json)
        return 0
    if arguments.part:
        run_part(arguments.part, arguments.json, arguments.only)
        return 0
    if not torch.cuda.is_available() and not arguments.rehearse:
        print("there is no GPU here: nothing was checked")
        return 2
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    results = Results(arguments.json, device=name)
    results.check("the C++ kernels are built", built_kernels)
    asked = arguments.parts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(Path(folder), results, arguments)
        if "checks" in asked:
            parts.run(CHECKS, LIMIT_S["checks"])
        if "kernels" in asked:
            parts.run(("kernels",), LIMIT_S["kernels"])
        if "steps" in asked:
            parts.run(("whole steps",), LIMIT_S["steps"])
    failed = [record for record in results.found if record.get("ok") is False or "failed" in record]
    for record in failed:
        print(f"FAIL {record.get('check', record.get('contestant'))}: {record.get('detail', record.get('failed'))}")
    print(f"{len(failed)} of {len(results.found)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
