"""The late device catches what it is there for: each planted fault shows in some schedule, and in none once mended."""

from __future__ import annotations

import threading

from helpers.ranks import run_alone

SCHEDULES = 40


def shown() -> dict[str, tuple[int, int]]:
    """Count the schedules that show each fault: as it is planted, and after its mend."""
    from helpers import late
    from helpers.late.planted import FAULTS

    def count(name: str, *, is_right: bool) -> int:
        found = 0
        for seed in range(SCHEDULES):
            with late.schedule(seed):
                found += any(value != 1 for value in FAULTS[name](is_right))
        return found

    late.start().goes_on = False
    return {name: (count(name, is_right=False), count(name, is_right=True)) for name in FAULTS}


def waits() -> dict[str, list[str]]:
    """List, for each thing that the host does, the functions in which it waits for the device."""
    import torch
    from helpers import late
    from helpers.late.planted import pageable_copy

    machine = late.start()
    value = torch.ones(4, device=late.DEVICE)
    done = {
        "a pageable copy": lambda: pageable_copy(False),
        "a pinned copy": lambda: pageable_copy(True),
        "item": lambda: value.sum().item(),
        "a branch": lambda: bool(value.any()),
        "a list": lambda: value.tolist(),
        "synchronize": lambda: torch.late.synchronize(late.DEVICE),
        "an event of another device": lambda: torch.late.Event().record(),
        "compute": lambda: value.mul(2).sum(),
    }
    found: dict[str, list[str]] = {}
    for name, run in done.items():
        with late.schedule(0):
            run()
            found[name] = list(machine.waits)
    return found


def test_planted_faults_show_and_mended_ones_do_not():
    found = run_alone(shown)
    assert {name: mended for name, (_, mended) in found.items()} == dict.fromkeys(found, 0)
    assert all(planted >= 3 for planted, _ in found.values()), found


def test_the_hosts_waits_are_counted():
    found = run_alone(waits)
    waiting = {name for name, places in found.items() if places}
    assert waiting == {"a pageable copy", "item", "a branch", "a list", "synchronize"}, found
    assert "a copy of pageable memory" in found["a pageable copy"][0]


def looks() -> tuple[float | None, float | None]:
    """Time work on a device that is not the current one: once that has ended, and once all has."""
    import torch
    from helpers import late

    from fxcomp.runtime.clock import Clock

    machine, clock = late.start(), Clock(torch.device(late.DEVICE))
    machine.goes_on = False
    value = torch.ones(4, device=late.DEVICE)
    machine.begin(0)
    machine.eagerness = 0.0
    start = clock.look()
    value.add_(1)
    end = clock.look()
    torch.late.synchronize(0)
    early = clock.us(start, end)
    machine.drain()
    return early, clock.us(start, end)


def test_a_device_is_timed_by_its_own_events_whichever_is_current():
    early, late = run_alone(looks)
    assert early is None
    assert late is not None
    assert late > 0


def brought_back() -> list[tuple[int, bool, list[str]]]:
    """Bring values back from the host while compute is stuck, and a copy to the host with it.

    Returns their size each time, if they have come, and the main thread's waits.
    """
    import torch
    from helpers import late
    from helpers.late import machine as machines
    from helpers.late.memory import on_host

    from fxcomp.runtime.runtime import Runtime
    from fxcomp.runtime.transport import NullTransport

    machine, device, found = late.start(), torch.device(late.DEVICE), []
    machines.STUCK_S, machine.goes_on = 5.0, False
    runtime, compute = Runtime(NullTransport(), device), torch.late.current_stream(device).stream_id
    for number, size in enumerate((1, 1, 1000, 1000, 1)):
        with late.schedule(number):
            sent, is_free = runtime.d2h("sent", torch.full((size,), number, device=device)), threading.Event()
            sent.result()
            machine.give(1, compute, machines.Job(may_begin=is_free.is_set))
            runtime.d2h("stuck", torch.zeros(size, device=device))
            back = runtime.h2d("back", sent)
            machine.run_what_can()
            waits = [each for each in machine.waits if each.startswith("MainThread")]
            found.append((size, on_host(machine, back).tolist() == [number] * size, waits))
            is_free.set()
    runtime.close()
    return found


def test_what_comes_back_from_the_host_waits_neither_for_compute_nor_for_what_goes_there():
    assert run_alone(brought_back) == [(size, True, []) for size in (1, 1, 1000, 1000, 1)]


def schedules() -> list[list[list[int]]]:
    """The streams' turns in some programs, twice for each seed."""
    from helpers import late
    from helpers.late.planted import FAULTS

    machine = late.start()
    machine.goes_on = False

    def turns(seed: int) -> list[int]:
        with late.schedule(seed):
            for program in FAULTS.values():
                program(True)
        return list(machine.ran)

    return [[turns(seed), turns(seed)] for seed in range(10)]


def test_a_seed_gives_the_same_schedule_and_another_one_another():
    found = run_alone(schedules)
    assert all(first == again for first, again in found)
    assert len({tuple(first) for first, _ in found}) > 2
