"""Saved states: mutated, read with `torch.load(weights_only=True)`, and loaded into live steps of two imagined ranks.

body      a file of torch.save, its bytes changed
state     the object of state_dict()
tensors   the tensors of checkpoint(), with `about`, the state as JSON
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import re
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.optim import SGD, AdamW

import fxcomp
from fxcomp.compat import CHECKSUM
from fxcomp.errors import BadState, FxcompError
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.state.checkpoint import _with_tensors, read_checkpoint, to_tensors
from fxcomp.state.checksums import sealed
from fxcomp.state.fields import _KNOWN, SCALE, VERSION
from fxcomp.step.compiled_step import CompiledStep
from hostile.kinds import Kind, Unfit
from hostile.mutate import mutated, nasty, text_of, torn
from hostile.pair import ANSWERS, batch, compiled, join

_CHECKED_SHARE = 0.02
"""Share of the refusals after which the good state is loaded and compared, besides the first of each kind of change."""

_GIVEN: Mapping[str, Any] = {"costs": fxcomp.CostTable(), "checks": fxcomp.Checks(verify="never", race="off")}
_ALL = "compress({0})@gpu > all_gather@world > decompress@gpu"


def _several() -> Plan:
    low_rank = (
        "propose(powersgd(1))@gpu > all_reduce@world > compress(powersgd(1))@gpu > all_reduce@world > decompress@gpu"
    )
    shots = (
        "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world"
        " > decompress@gpu"
    )
    return Plan(
        (
            Bucket(("head.bias", "head.weight"), (3, 24), Strategy.parse(shots)),
            Bucket(("body.bias",), (8,), DENSE),
            Bucket(("body.weight",), (48,), Strategy.parse(low_rank)),
        )
    )


def _random() -> Plan:
    drawn = Strategy.parse(_ALL.format("int8(stochastic=true)"))
    return Plan((Bucket(("head.bias", "head.weight", "body.bias", "body.weight"), (3, 24, 8, 48), drawn),))


def _momenta() -> Plan:
    sign = Strategy.parse(_ALL.format("sign"))
    return Plan(
        (Bucket(("head.weight", "body.weight"), (24, 48), sign), Bucket(("head.bias", "body.bias"), (3, 8), DENSE))
    )


@dataclass(frozen=True)
class Job:
    """A step, and the numbers of steps after which its state is saved."""

    make: Callable[[], CompiledStep]
    saved_after: tuple[int, ...] = (3,)
    begins_dense: bool = False
    """True if the job follows the plan of a state that is loaded before its first step. Each loads in a child."""


def _sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.01, momentum=0.9)


def _adam(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-3)


def _at_momenta() -> CompiledStep:
    warm = fxcomp.Warmup(int8_steps=3)
    return compiled(_adam, compress=fxcomp.Compress(plan=_momenta().at_momenta(), warmup=warm), **_GIVEN)


JOBS: Mapping[str, Job] = {
    "several": Job(lambda: compiled(_sgd, compress=_several(), **_GIVEN)),
    "random": Job(lambda: compiled(_adam, compress=_random(), **_GIVEN)),
    "warm-up": Job(
        lambda: compiled(_sgd, compress=fxcomp.Compress(plan=_random(), warmup=fxcomp.Warmup(int8_steps=4)), **_GIVEN),
        (2, 6),
    ),
    "momenta": Job(_at_momenta, (2, 6)),
    "chosen": Job(
        lambda: compiled(_adam, compress="balanced", checks=fxcomp.Checks(verify="never")), begins_dense=True
    ),
}


class Live:
    """A live step, its good states, and what it does next from each of them."""

    def __init__(self, job: Job) -> None:
        self.step, self.is_fresh = job.make(), job.begins_dense
        self.states: list[dict[str, Any]] = []
        self.kept: list[Any] = []
        self.next: list[list[bytes]] = []
        if job.begins_dense:
            calendar = {"patience": 1, "patient_until": 0, "begins": 0, "is_settled": True}
            saved = {**self.step.state_dict(), "followed plan": _random().to_json(), "calendar": calendar}
            self.states = [{**saved, "steps": 3}]
            return
        for number in range(max(job.saved_after)):
            self.step(batch(number))
            if number + 1 in job.saved_after:
                self.states.append(copy.deepcopy(self.step.state_dict()))
                self.kept.append(self._copied())
        for number in range(len(self.states)):
            self.next.append(self.goes_on(number))

    def _copied(self) -> Any:
        training = self.step.training
        return copy.deepcopy((training.model.state_dict(), [each.state_dict() for each in training.optimizers]))

    def restore(self, number: int) -> None:
        """Load a good state: the model's, the optimizer's and the step's."""
        self.restore_model(number)
        self.step.load_state_dict(copy.deepcopy(self.states[number]))

    def restore_model(self, number: int) -> None:
        training = self.step.training
        model, optimizers = copy.deepcopy(self.kept[number])
        training.model.load_state_dict(model)
        for each, state in zip(training.optimizers, optimizers, strict=True):
            each.load_state_dict(state)

    def goes_on(self, number: int) -> list[bytes]:
        """Return the bits of everything after a step from a good state."""
        self.restore(number)
        self.step(batch(100))
        saved = to_tensors(self.step.state_dict())
        tensors = {**self.step.training.model.state_dict(), **saved}
        return [value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for value in tensors.values()]


class States(Kind):
    name, suffix = "state", ".pt"
    mutations = 100_000

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._draw, self._change = Random(0), ""

    @cached_property
    def lives(self) -> list[Live]:
        join()
        ANSWERS["comparing"] = lambda facts: [[1, *fact[1:]] for fact in facts[:1]]
        return [Live(job) for job in JOBS.values()]

    @cached_property
    def samples(self) -> Sequence[Any]:
        """Pairs of a live step's number and the object to load."""
        found: list[tuple[int, int, Any]] = []
        for where, live in enumerate(self.lives):
            for number, state in enumerate(live.states):
                other = {**copy.deepcopy(state), "rank": 2, "ranks": 3}
                owed = {**state, "owed": {"head.bias": torch.ones(3)}}
                drawn = {**state, "generators": {"cpu": torch.get_rng_state()}}
                found += [(where, number, _resealed(each)) for each in (state, owed, [{**state, "ranks": 3}, other])]
                found.append((where, number, to_tensors(sealed(drawn))))
        return found

    def write(self, data: Any) -> bytes:
        self._aimed = data[:2]
        file = io.BytesIO()
        torch.save(data, file)
        return file.getvalue()

    def mutation(self, draw: Random) -> tuple[bytes, str]:
        where, number, sample = draw.choice(self.samples)
        if self.lives[where].is_fresh and draw.random() < 0.8:  # a child takes longer
            where, number, sample = draw.choice(self.samples)
        is_tensors = isinstance(sample, dict) and "rank0.about" in sample
        chance = draw.random()
        try:
            if chance < 0.25:
                raw, change = torn(self.write((where, number, sample)), draw)
            elif is_tensors and chance < 0.9:
                text = bytes(sample["rank0.about"].tolist())
                if chance < 0.6:
                    text, change = torn(text, draw)
                else:
                    data, change = mutated(json.loads(text), draw)
                    text = text_of(_resealed_about(data, sample)).encode("utf-8", "surrogatepass")
                about = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
                raw = self.write((where, number, {**sample, "rank0.about": about}))
            else:
                data, change = mutated(sample, draw)
                raw = self.write((where, number, _resealed(data)))
        except (RuntimeError, RecursionError, OverflowError, pickle.PicklingError, NotImplementedError):
            return self.mutation(draw)  # torch cannot save it
        self._draw, self._change = draw, change
        return raw, f"{where}.{number} {change}"

    def read(self, path: Path) -> Any:
        try:
            *_, given = torch.load(path, weights_only=True)
        except Exception as error:
            raise RefusedByTorch(str(error)) from None
        where, number = self._aimed
        live = self.lives[where]
        if live.is_fresh:
            in_a_child(lambda: _load_and_step(live.step, given))
            return live, number, given
        try:
            live.step.load_state_dict(given)
        except FxcompError:
            if self._draw.random() < _CHECKED_SHARE or self._change not in self._seen:
                self._check(live, number)
            self._seen.add(self._change)
            raise
        return live, number, given

    def _check(self, live: Live, number: int) -> None:
        if live.goes_on(number) != live.next[number]:
            raise Unfit("the good state does not go on as before")

    def use(self, read: Any, *, fully: bool) -> None:
        live, number, given = read
        if live.is_fresh:
            return
        step = live.step
        live.restore_model(number)
        is_small = SCALE not in self._change and all(bool((v.abs() < 1e4).all()) for v in _tensors(given))
        try:
            saved = step.state_dict()
            to_tensors(saved)
            json.dumps(step.metrics())
            loss = step(batch(200))
            step.explain().encode()
            repr(step).encode()
            if (is_small and not loss.isfinite()) or step.steps < 0:
                raise Unfit(f"the loss is {loss}")
            step(batch(201))
            after = torch.cat([p.detach().reshape(-1) for p in step.training.model.parameters()])
            if is_small and not after.isfinite().all():
                raise Unfit("parameters are not finite")
        finally:
            if fully:
                self._check(live, number)


def _load_and_step(step: CompiledStep, given: Any) -> None:
    step.load_state_dict(given)
    for number in range(3):
        step(batch(number))
    step.explain().encode()
    to_tensors(step.state_dict())


def in_a_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked process, and raise an error like its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = b""
        try:
            work()
        except BaseException as error:
            frames = [each for each in traceback.extract_tb(error.__traceback__) if "/fxcomp/" in each.filename]
            where = f" in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
            kind = "refused" if isinstance(error, FxcompError) else "failed"
            text = f"{kind} {type(error).__name__}{where}: {str(error)[:200]}".encode(errors="replace")
        os.write(writer, text)
        os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as file:
            said = file.read().decode()
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    kind, _, rest = said.partition(" ")
    if kind == "refused":
        raise BadState(rest)
    if kind == "failed" or (os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL):
        raise Unfit(rest or f"a child ended by signal {os.WTERMSIG(status)}")


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for held in value.values():
            yield from _tensors(held)
    elif isinstance(value, list | tuple):
        for held in value:
            yield from _tensors(held)


def _resealed(data: Any) -> Any:
    """Return states with checksums that fit, where they can have one."""
    if isinstance(data, list):
        return [_resealed(each) for each in data]
    try:
        is_state = isinstance(data, dict) and "rank0.about" not in data
        return {**data, CHECKSUM: _checksum(data)} if is_state else data
    except (TypeError, ValueError, RuntimeError):
        return data


def _resealed_about(about: Any, tensors: Mapping[str, Tensor]) -> Any:
    try:
        return {**about, CHECKSUM: _checksum(_with_tensors(about, tensors, 0))}
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
        return about


def _checksum(state: Mapping[str, Any]) -> str:
    return sealed({name: value for name, value in state.items() if name in _KNOWN})[CHECKSUM]


class RefusedByTorch(FxcompError):
    """torch.load refuses the file."""


class Folders(Kind):
    """Folders of torch.distributed.checkpoint, whose `.metadata` is a pickle. A sample is the bytes of their files."""

    name, suffix = "checkpoint folder", ""

    @cached_property
    def samples(self) -> Sequence[Any]:
        state = {
            "version": VERSION,
            "plan": "",
            "rank": 0,
            "ranks": 2,
            "steps": 1,
            "learning_rates": {},
            "residuals": {},
        }
        state |= {"owed": {"a": torch.arange(12.0)}, "compressors": {}}
        saved = {"step": to_tensors(sealed(state)), "model": {"weight": torch.ones(3, 2)}}
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.save(saved, checkpoint_id=folder, no_dist=True)
            return [{file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}]

    def write(self, data: Any) -> bytes:
        return pickle.dumps(data)

    def mutation(self, draw: Random) -> tuple[bytes, str]:
        files = dict(self.samples[0])
        name = draw.choice((".metadata", ".metadata", *files))
        if draw.random() < 0.5:
            files[name], change = torn(files[name], draw)
        else:
            found = pickle.loads(files[".metadata"])
            at = draw.choice(list(found.storage_data.values()))
            about = draw.choice(list(found.state_dict_metadata.values()))
            field = draw.choice(("relative_path", "offset", "length", "size", "chunks", "dtype", "code", "names"))
            change = f"{name} {field}"
            if field in ("relative_path", "offset", "length"):
                value = draw.choice((nasty(draw), "../file", "/dev/zero", "/etc/passwd", 2**40))
                object.__setattr__(at, field, value)
            elif field == "dtype":
                object.__setattr__(about.properties, "dtype", draw.choice((torch.complex128, nasty(draw))))
            elif field == "code":
                found.planner_data = draw.choice((_Called(), io.BytesIO(b"x"), sealed, Random, re.compile("a")))
            elif field == "names":
                found.state_dict_metadata = {draw.choice((str(nasty(draw)), f"step.rank0.{name}", name)): about}
            else:
                size = torch.Size(draw.choice(((2**40,), (2**62, 4), (0,), (2**28,), ())))
                object.__setattr__(about, field, size if field == "size" else [])
            files[".metadata"] = pickle.dumps(found)
        return self.write(files), change

    def read(self, path: Path) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in pickle.loads(path.read_bytes()).items():
                Path(folder, name).write_bytes(content)
            try:
                return read_checkpoint(folder, rank=0, ranks=1)
            finally:
                if _Called.ran:
                    raise Unfit("code of the folder has run")

    def use(self, read: Any, *, fully: bool) -> None:
        del fully
        if any(not isinstance(value, Tensor) for value in read.values()):
            raise Unfit("it holds no tensors")


class _Called:
    """Notes that unpickling has called something."""

    ran: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return _note, ()


def _note() -> None:
    _Called.ran.append(1)
