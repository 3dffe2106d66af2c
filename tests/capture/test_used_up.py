"""Refused while tracing: iterators and streams that advance, draws of the operating system, clocks."""

from __future__ import annotations

import csv
import datetime
import io
import itertools
import os
import random
import re
import secrets
import time
import timeit
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers.followed import BATCH, compiled, small
from helpers.jobs import cross_entropy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fxcomp import errors

ONES = [1.0] * 9


def ones() -> Iterator[float]:
    while True:
        yield 1.0


def passing_on() -> Iterator[float]:
    yield from ONES


def going_through() -> Iterator[torch.Tensor]:
    for value in torch.ones(9).unbind():  # noqa: UP028
        yield value


def second_round() -> Any:
    again = itertools.cycle([1.0, 2.0])
    return next(again), next(again), again


def taken(first: Any, second: Any) -> Any:
    next(first)
    return second


def lines() -> Any:
    return io.TextIOWrapper(io.BytesIO(b"1\n" * 9))


def lines_that_were_read() -> Any:
    file = lines()
    return taken(file, file)


class Own:
    """An iterator of the user's."""

    def __init__(self) -> None:
        self.inside = iter(ONES)

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> float:
        return next(self.inside)


ITERATORS: dict[str, Callable[[], Any]] = {
    "list": lambda: iter(ONES),
    "dict": lambda: iter(dict.fromkeys(range(9))),
    "generator": ones,
    "yield from": passing_on,
    "generator of tensors": going_through,
    "count": lambda: itertools.count(1),
    "cycle": lambda: itertools.cycle(ONES),
    "second round of a cycle": lambda: second_round()[-1],
    "chain": lambda: itertools.chain(ONES, ONES),
    "islice": lambda: itertools.islice(ones(), 9),
    "accumulate": lambda: itertools.accumulate(ONES),
    "repeat": lambda: itertools.repeat(1.0, 9),
    "product": lambda: itertools.product(ONES, ONES),
    "permutations": lambda: itertools.permutations(range(3)),
    "pairwise": lambda: itertools.pairwise(ONES),
    "groupby": lambda: itertools.groupby(range(9)),
    "zip_longest": lambda: itertools.zip_longest(ONES, ONES),
    "tee": lambda: itertools.tee(ONES)[0],
    "the second of a tee": lambda: taken(*itertools.tee(ONES)),
    "map": lambda: map(float, ONES),
    "zip": lambda: zip(ONES, ONES, strict=True),
    "enumerate": lambda: enumerate(ONES),
    "filter": lambda: filter(None, ONES),
    "reversed": lambda: reversed(ONES),
    "StringIO": lambda: io.StringIO("1\n1\n1\n"),
    "file": lines,
    "file that is read already": lines_that_were_read,
    "csv": lambda: csv.reader(["1", "1", "1"]),
    "csv of names": lambda: csv.DictReader(io.StringIO("a\n1\n1\n1\n")),
    "finditer": lambda: re.finditer("1", "1111"),
    "map of finditer": lambda: map(repr, re.finditer("1", "1111")),
    "iter of a callable": lambda: iter(deque([1, 1, 1]).popleft, 2),
    "iter of a stream": lambda: iter(io.StringIO("1\n1\n").readline, ""),
    "flat": lambda: np.ones(9).flat,
    "nditer": lambda: np.nditer(np.ones(9)),
    "loader": lambda: iter(DataLoader(TensorDataset(torch.ones(9)))),
    "own": Own,
}


def number(value: Any) -> float:
    return 1.0 if value is not None else 2.0


@pytest.mark.parametrize("name", ITERATORS)
def test_taking_from_an_iterator_is_refused(name: str):
    iterator = ITERATORS[name]()
    with pytest.raises(errors.FxcompError) as caught:
        compiled(small(), lambda model, batch: number(next(iterator)) * cross_entropy(model, batch))
    if name not in ("iter of a callable", "loader"):
        assert isinstance(caught.value, errors.DrawsInPython)
        assert re.search(r"takes the next value of loss_fn's iterator.*pass it in the batch", str(caught.value), re.S)


UNSEEN = ("finditer", "nditer", "map of finditer", "file that is read already")


@pytest.mark.parametrize("name", [name for name in ITERATORS if name not in UNSEEN])
def test_an_iterator_that_is_looked_at_and_stays_is_not_refused(name: str):
    iterator = ITERATORS[name]()
    step = compiled(small(), lambda model, batch: number(iterator) * cross_entropy(model, batch))
    step(BATCH)
    assert next(iterator) is not None


def test_a_method_in_hand_takes_from_its_iterator_all_the_same():
    take, pop = iter(ONES).__next__, [1.0, 1.0, 1.0, 1.0].pop
    with pytest.raises(errors.DrawsInPython, match="takes the next value of loss_fn's take's self"):
        compiled(small(), lambda model, batch: take() * cross_entropy(model, batch))
    with pytest.raises(errors.StepChanged, match="itself changes the model"):
        compiled(small(), lambda model, batch: pop() * cross_entropy(model, batch))


# Draws and clocks without a state

SYSTEM = random.SystemRandom()
NOW = datetime.datetime.now
URANDOM = os.urandom

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "urandom": (lambda: os.urandom(1)[0], "os.urandom"),
    "urandom in hand": (lambda: URANDOM(1)[0], "os.urandom"),
    "SystemRandom": (lambda: SYSTEM.random(), "os.urandom"),
    "SystemRandom's choice": (lambda: SYSTEM.choice([1, 2]), "os.urandom"),
    "secrets": (lambda: secrets.randbelow(9), "os.urandom"),
    "secrets' text": (lambda: len(secrets.token_hex(4)), "os.urandom"),
    "uuid4": (lambda: uuid.uuid4().int % 7, "os.urandom"),
    "uuid1": (lambda: uuid.uuid1().int % 7, "(uuid._generate_time_safe|random)"),
    "time": (lambda: time.time() % 2, "time.time"),
    "perf_counter": (lambda: time.perf_counter() % 2, "time.perf_counter"),
    "timeit": (lambda: timeit.default_timer() % 2, "time.perf_counter"),
    "perf_counter in hand": (lambda: perf_counter() % 2, "time.perf_counter"),
    "monotonic_ns": (lambda: time.monotonic_ns() % 2, "time.monotonic_ns"),
    "now": (lambda: datetime.datetime.now().microsecond % 2, "datetime.now"),
    "now of a zone": (lambda: datetime.datetime.now(datetime.UTC).microsecond % 2, "datetime.now"),
    "strftime": (lambda: int(time.strftime("%S")), "time.strftime"),
    "localtime": (lambda: time.localtime().tm_sec, "time.localtime"),
    "gmtime": (lambda: time.gmtime().tm_sec, "time.gmtime"),
    "ctime": (lambda: len(time.ctime()), "time.ctime"),
    "asctime": (lambda: len(time.asctime()), "time.asctime"),
    "clock_gettime": (lambda: time.clock_gettime(time.CLOCK_REALTIME) % 2, "time.clock_gettime"),
    "times": (lambda: os.times().user, "os.times"),
    "today": (lambda: datetime.date.today().day, "time.time"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_the_operating_system_draws_or_tells_is_refused_with_its_line(name: str):
    call, text = CALLS[name]
    with pytest.raises(errors.DrawsInPython, match=rf"(?s)(from|calls) {text}, at test_used_up.py:\d+: .*in the batch"):
        compiled(small(), lambda model, batch: call() * cross_entropy(model, batch))
    assert os.urandom is URANDOM
    assert time.perf_counter is perf_counter
    assert type(datetime.datetime.now()) is datetime.datetime


def test_a_clock_is_measured_outside():
    with pytest.raises(errors.DrawsInPython, match=r"(?s)repeat today's time for ever.*Measure time outside"):
        compiled(small(), lambda model, batch: time.time() * cross_entropy(model, batch))


def test_a_time_that_is_given_may_be_written_as_a_date():
    def loss(model: nn.Module, batch: Any) -> Any:
        day = time.gmtime(86400.0)
        return (day.tm_mday + int(time.strftime("%Y", day)) / 1970) * cross_entropy(model, batch)

    model, batch = small(), BATCH
    expected = loss(model, batch)
    assert torch.equal(compiled(model, loss)(batch), expected)


class Clocked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(20, 10)
        self.clock = time.perf_counter


def test_a_clock_that_the_model_keeps_is_seen_and_put_back():
    model = Clocked()
    with pytest.raises(errors.DrawsInPython, match="perf_counter"):
        compiled(model, lambda model, batch: (model.clock() > 0) * cross_entropy(model, batch))
    assert model.clock is time.perf_counter


def test_logging_reads_the_clock_for_itself(caplog: pytest.LogCaptureFixture):
    import logging

    logger = logging.getLogger("of a loss function")

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logger.warning("traced")
        return cross_entropy(model, batch) * (os.getpid() > 0)

    compiled(small(), loss)(BATCH)
    assert "traced" in caplog.text
