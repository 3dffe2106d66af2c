"""The demo's text and chart, of contestants written by hand."""

import random
from dataclasses import replace

from fxcomp.commands.demo.run import Contestant, chart, describe, speedup


def contestants(ddp_s: float, bf16_s: float, powersgd_s: float, fxcomp_s: float, free_s: float) -> list[Contestant]:
    def steps(middle: float) -> list[float]:
        return [middle * (1 + 0.01 * ((k * 7) % 5 - 2)) for k in range(20)]

    return [
        Contestant("ddp", steps(ddp_s), 20_200_000, train_loss=2.0, validation_loss=2.5),
        Contestant("bf16_hook", steps(bf16_s), 10_100_000, train_loss=2.0, validation_loss=2.5),
        Contestant("powersgd_hook", steps(powersgd_s), 400_000, train_loss=2.4, validation_loss=2.9),
        Contestant("fxcomp", steps(fxcomp_s), 2_700_000, train_loss=2.01, validation_loss=2.51),
        Contestant("free", steps(free_s)),
    ]


def test_the_chart_is_last_and_shows_the_faster_hook():
    found = contestants(0.8, 0.5, 0.42, 0.4, 0.36)
    assert describe(found, "A title.", "100.0 % int4, in 1 bucket") == "\n".join(
        [
            "A title.",
            "",
            "fxcomp makes a step 2.00 times as fast as DDP (95 % interval 2.00 to 2.00).",
            "It recovers 91 % of the 440 ms that the network costs DDP.",
            "fxcomp makes a step 1.05 times as fast as DDP with the PowerSGD hook, the faster hook here "
            "(95 % interval 1.05 to 1.05).",
            "DDP with the bf16 hook took 500 ms a step.",
            "fxcomp's plan: 100.0 % int4, in 1 bucket.",
            "Medians of 20 steps, taken in turns, and bytes sent by a host in one; losses after the same number of "
            "steps on the same batches.",
            "",
            "                    ms a step                                        MB sent  train loss  validation loss",
            "DDP                       800  ████████████████████████████████████    20.20       2.000            2.500",
            "DDP, PowerSGD hook        420  ███████████████████                      0.40       2.400            2.900",
            "fxcomp                    400  ██████████████████                       2.70       2.010            2.510",
            "no network                360  ████████████████                            –           –                –",
        ]
    )


def test_a_chart_fits_the_terminal_and_gives_up_losses_before_bars():
    found = contestants(0.8, 0.5, 0.42, 0.4, 0.36)
    for width in (110, 80, 60, 40):
        assert all(len(line) <= width for line in chart(found, width))
        assert "█" * 8 in chart(found, width)[1]
    assert "validation loss" in chart(found, 80)[0]
    assert "validation loss" not in chart(found, 60)[0]


def test_a_slower_fxcomp_is_called_slower():
    text = describe(contestants(0.8, 0.3, 0.42, 0.4, 0.2), "A title.")
    assert "fxcomp makes a step 2.00 times as fast as DDP (" in text
    assert "fxcomp is SLOWER here than DDP with the bf16 hook, the faster hook here: 0.75 times as fast" in text
    assert "fxcomp's plan" not in text


def test_a_few_steps_decide_nothing():
    found = [replace(each, step_s=each.step_s[:2]) for each in contestants(0.4, 0.3, 0.42, 0.8, 0.2)]
    text = describe(found, "A title.")
    assert "2 steps of each are too few to compare; 8 are the least." in text
    assert "SLOWER" not in text
    assert "interval" not in text


def test_a_difference_within_the_noise_wins_nothing():
    text = describe(contestants(0.2, 0.21, 0.3, 0.2, 0.199), "A title.")
    assert "fxcomp is not faster here than DDP, within the measurement's error: 1.00 times as fast" in text
    assert "The network costs DDP next to nothing here, so there is nothing to win." in text


def test_nothing_is_recovered_where_fxcomp_is_no_faster():
    assert "recovers" not in describe(contestants(0.4, 0.3, 0.42, 0.4, 0.2), "A title.")


def test_the_interval_of_a_speedup_holds_the_true_one_and_not_one():
    generator = random.Random(0)
    fast, slow = (Contestant("", [middle * generator.uniform(0.9, 1.1) for _ in range(40)]) for middle in (0.20, 0.24))
    _, low, high = speedup(fast, slow)
    assert 1.0 < low < 1.2 < high < 1.4
    assert speedup(slow, fast)[2] < 1.0
