"""Lines that go aside, on a device that works late: who waits for whom, and what counts as a wait for the network."""

from __future__ import annotations

from helpers.ranks import run_alone

from fxcomp.runtime.clock import Clock, Waits


def crossed() -> dict[str, object]:
    """Write on one stream and read on the other, in both directions, with lines in line or aside."""
    import torch
    from helpers import late

    from fxcomp.runtime.clock import Clock
    from fxcomp.runtime.runtime import Runtime
    from fxcomp.runtime.stopwatch import Stopwatch
    from fxcomp.runtime.transport import NullTransport

    machine, device = late.start(), torch.device(late.DEVICE)
    machine.goes_on = False
    runtime = Runtime(NullTransport(), device)
    side, current = runtime.side, torch.late.current_stream

    def known(is_in_line: bool) -> tuple[bool, bool]:
        side.is_in_line = is_in_line
        with runtime.aside():
            return side.is_used, current(device).stream_id != compute

    compute = current(device).stream_id
    found: dict[str, object] = {"aside": known(False), "in line": known(True)}
    side.is_in_line = False

    watch = Stopwatch(runtime, ("launch",), Clock())
    watch.start()
    found["timed"] = side.is_in_line
    watch.stop()
    found["afterwards"] = side.is_in_line

    def ahead(do: str) -> list[float]:
        """Read where the other stream has written last, by schedules that put either off."""
        seen: list[float] = []
        for seed in range(40):
            with late.schedule(seed):
                value = torch.zeros(64, device=device)
                with runtime.aside(value):
                    value.add_(1)
                if do == "join":
                    runtime.join(value)
                elif do == "meet":
                    side.meet()
                seen.append(value.clone().sum().item() / 64)
        return seen

    found |= {do: set(ahead(do)) for do in ("join", "meet")}
    found["neither"] = len(set(ahead("")))

    def reused(is_told: bool) -> int:
        """Free a value of one stream while the other still reads it; returns how often it was overwritten."""
        wrong = 0
        for seed in range(40):
            with late.schedule(seed):
                value = torch.ones(64, device=device)
                with runtime.aside(value) if is_told else runtime.aside():
                    read = value * 1
                del value
                other = torch.zeros(64, device=device)
                runtime.join(read)
                wrong += read.sum().item() != 64
                del other
        return wrong

    found["told"], found["untold"] = reused(True), reused(False) > 0
    runtime.close()
    return found


def test_streams_wait_for_each_other_where_they_cross():
    found = run_alone(crossed)
    assert found.pop("neither") == 2, "some schedules show what nobody waits for"
    assert found == {
        "aside": (True, True),
        "in line": (False, False),
        "timed": True,
        "afterwards": False,
        "join": {1.0},
        "meet": {1.0},
        "told": 0,
        "untold": True,
    }


def test_compute_waits_for_the_network_where_both_stand_still():
    """Compute stands still from 10 to 30 and from 50 to 60 for what is aside, which waits from 0 to 15 and 25 to 55."""
    waits = Waits(for_aside=[(10_000, 30_000), (50_000, 60_000)], network_aside=[(0, 15_000), (25_000, 55_000)])
    assert waits.exposed_us(Clock(), 0) == 5 + 5 + 5
    waits.for_network.append((70_000, 72_000))
    assert waits.exposed_us(Clock(), 0) == 17
    assert Waits(network_aside=[(0, 9_000)]).exposed_us(Clock(), 0) == 0
    assert Waits(for_aside=[(0, 9_000)]).exposed_us(Clock(), 0) == 0
