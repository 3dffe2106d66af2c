"""The demo's table and verdict, for contestants written by hand."""

from fxcomp.commands.demo.result import Contestant, describe


def contestants(ddp_s: float, fxcomp_s: float, free_s: float) -> list[Contestant]:
    return [
        Contestant("ddp", [ddp_s], 57_000_000, train_loss=2.0, validation_loss=2.5),
        Contestant("fxcomp", [fxcomp_s], 14_000_000, train_loss=2.1, validation_loss=2.51, exposed_ms=7.0),
        Contestant("free", [free_s]),
    ]


def test_a_faster_step_is_told_with_what_it_recovers():
    assert describe(contestants(0.5, 0.25, 0.2), "a link of 300mbit") == (
        "GPT, 2 ranks, a link of 300mbit\n"
        "        steps/s  exposed ms/step  MB on the wire/step  train loss  validation loss\n"
        "   ddp     2.00              300                57.00       2.000            2.500\n"
        "fxcomp     4.00                7                14.00       2.100            2.510\n"
        "  free     5.00                –                    –           –                –\n"
        "\n"
        "fxcomp makes a step 2.00 times as fast as DDP. It recovers 83% of what the network costs DDP."
        " The validation losses differ by +0.010."
    )


def test_a_network_that_costs_nothing_wins_nothing():
    assert "as fast as each other here" in describe(contestants(0.2, 0.2, 0.2), "loopback")
    assert "fxcomp is slower than DDP here, by 50%." in describe(contestants(0.2, 0.3, 0.2), "loopback")
