"""Write the demo's result: a few sentences, then a bar for each contestant's step."""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.commands.demo.result import DDP, FREE, FXCOMP, HOOKS, LABELS, Contestant, Speedup, best_hook, speedup

_BAR = 36  # characters, for the longest step
_LEAST_COST = 0.03  # of DDP's step: a network that costs less has nothing to recover


def describe(contestants: Sequence[Contestant], title: str, plan: str = "") -> str:
    """Write what was found. The chart is last."""
    named = {each.name: each for each in contestants}
    hook = best_hook(contestants)
    other = next(each for each in contestants if each.name in HOOKS and each is not hook)
    shown = [named[DDP], hook, named[FXCOMP], named[FREE]]
    sentences = [
        _against(speedup(named[FXCOMP], named[DDP]), "DDP"),
        _recovered(*(named[name] for name in (DDP, FXCOMP, FREE))),
        _against(speedup(named[FXCOMP], hook), f"{_spoken(hook)}, the faster hook here"),
        f"{_spoken(other)} took {other.median_ms:.0f} ms a step.",
        f"fxcomp's plan: {plan}." if plan else "",
    ]
    steps = len(named[DDP].step_s)
    foot = f"Medians of {steps} steps, taken in turns; losses after the same number of steps on the same batches."
    return "\n".join([title, "", *filter(None, sentences), foot, "", *chart(shown)])


def chart(contestants: Sequence[Contestant]) -> list[str]:
    """Draw a bar for each contestant's step, with its bytes and losses."""
    longest = max(each.median_ms for each in contestants)
    rows = [("", "ms a step", "", "MB sent a step", "train loss", "validation loss")]
    for each in contestants:
        sent = "–" if each.name == FREE else f"{each.wire_bytes / 1e6:.2f}"
        losses = ["–" if loss is None else f"{loss:.3f}" for loss in (each.train_loss, each.validation_loss)]
        bar = "█" * max(round(_BAR * each.median_ms / longest), 1)
        rows.append((LABELS[each.name], f"{each.median_ms:.0f}", bar, sent, losses[0], losses[1]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[2] = _BAR
    are_left = (True, False, True, False, False, False)
    return [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, are_left, strict=True)
        ).rstrip()
        for row in rows
    ]


def _against(found: Speedup, whom: str) -> str:
    interval = f"95 % interval {found.low:.2f} to {found.high:.2f}"
    if found.is_faster:
        return f"fxcomp makes a step {found.ratio:.2f} times as fast as {whom} ({interval})."
    if found.is_slower:
        return f"fxcomp is SLOWER here than {whom}: {found.ratio:.2f} times as fast ({interval})."
    return (
        f"fxcomp is not faster here than {whom}, as far as can be told: {found.ratio:.2f} times as fast ({interval})."
    )


def _recovered(ddp: Contestant, fxcomp: Contestant, free: Contestant) -> str:
    cost = ddp.median_ms - free.median_ms
    if cost < _LEAST_COST * ddp.median_ms:
        return "The network costs DDP next to nothing here, so there is nothing to win."
    if not speedup(fxcomp, ddp).is_faster:
        return ""
    share = 100 * (ddp.median_ms - fxcomp.median_ms) / cost
    return f"It recovers {share:.0f} % of the {cost:.0f} ms that the network costs DDP."


def _spoken(contestant: Contestant) -> str:
    return LABELS[contestant.name].replace(", ", " with the ")
