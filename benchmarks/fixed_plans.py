"""Fixed plans for contestants, in two shots over all ranks, without choice or race."""

from __future__ import annotations

from collections.abc import Callable

import fxcomp
from fxcomp.plan.compress import GivenCompress

AT_ONCE = fxcomp.Warmup(int8_steps=2)
"""Short warm-up, for timing the steps after it."""


def shots(first: str, second: str | None = None) -> str:
    second = second or first
    return (
        f"compress({first})@gpu > all_to_all@world > decompress@gpu > compress({second})@gpu > all_gather@world"
        " > decompress@gpu"
    )


def at_momentum(setting: str, warmup: fxcomp.Warmup) -> fxcomp.Compress:
    return fxcomp.Compress(plan=shots(setting), at="momentum", warmup=warmup)


FIXED: dict[str, Callable[[], GivenCompress]] = {
    "dense": lambda: "dense",
    "int8": lambda: shots("int8"),
    "int4": lambda: shots("int4"),
    "momentum_sign": lambda: at_momentum("sign(65536)", AT_ONCE),
    "momentum_cmax8": lambda: at_momentum("cmax(8)", AT_ONCE),
    "momentum_cmax16": lambda: at_momentum("cmax(16)", AT_ONCE),
}
"""Plans by contestant name."""
