"""Some sentences of forward and backward passes, beside DistributedDataParallel; `fuzz_passes.py` says hundreds."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from fuzzing.passes import Net, Speaker, Verdict, draw, fresh, frontends, judge, parse, rows
from helpers.ranks import run_ranks

SENTENCES = {
    "F2 f3 B0+1 S z": "equal",
    "f2 F3 B0+1 S Z f1 F2 B2+3 S": "equal",
    "f3 B0 F1 f2 B1+2 S z": "equal",
    "f2 B0 F2 g3 f1 B1+2 z F3 f2 B3+4 S": "equal",
    "F2 F3 B0+1 S": "equal",
    "F3 f2 B1 S": "equal",
    "F2 f3 B0 B1 f2 F1 B2+3 S": "equal",
    "f2 f3 B0+1 F1 B0+2 S z": "equal",
    "g2 F1 B0 S Z F5 B1 S": "equal",
    "F2 F3 B0 B1 S": "whole",
    "F2 B0 B0 S": "whole",
    "F2 f3 B1 B0 S": "whole",
}
"""Each with its end for the backend."""


def said() -> dict[str, list[Verdict]]:
    """End all sentences: the backend, the hook, and a model without gradient reduction."""
    speakers = frontends()
    alone = Net()
    unreduced = Speaker(alone, lambda x: alone(x), contextlib.nullcontext)
    everyone = {"backend": speakers["backend"], "hook": speakers["hook"], "unreduced": unreduced}
    return {
        name: [judge(parse(text), speakers["ddp"], speaker) for text in SENTENCES] for name, speaker in everyone.items()
    }


@pytest.mark.slow
def test_every_order_of_passes_is_averaged_as_ddp_does_and_never_in_part():
    one, other = run_ranks(2, said)
    assert one == other
    found = dict(zip(SENTENCES, one["backend"], strict=True))
    assert {text: verdict.kind for text, verdict in found.items()} == SENTENCES, found
    assert {verdict.kind for verdict in one["hook"]} == {"equal"}, one["hook"]
    assert {verdict.kind for verdict in one["unreduced"]} == {"wrong"}, "a sentence tells who averages"


def inputs_of_some() -> dict[str, bool]:
    """Go backward to one parameter after a pass that stayed local: what the others hold goes out with a later pass."""
    rank, speakers = dist.get_rank(), frontends()
    ddp, ours = speakers["ddp"], speakers["backend"]
    for speaker in (ddp, ours):
        fresh(speaker.model)
        list(speaker.say(parse("F2 B0 z f2 B1"), rank))
    others = [p for name, p in ours.model.named_parameters() if name != "last.bias"]
    own = [p.grad.clone() for p in others if p.grad is not None]
    ours.call(rows(2, 9, rank)).square().mean().backward(inputs=[ours.model.get_parameter("last.bias")])
    found = {"they stay": all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(others, own, strict=True))}
    for speaker in (ddp, ours):
        list(speaker.say(parse("F3 B0"), rank))
    expected = [p.grad for name, p in ddp.model.named_parameters() if name != "last.bias"]
    pairs = zip(others, expected, strict=True)
    return found | {"they are averaged": all(bool(torch.allclose(p.grad, g, atol=1e-6)) for p, g in pairs)}


@pytest.mark.slow
def test_a_backward_pass_to_some_parameters_loses_nothing_of_the_others():
    for found in run_ranks(2, inputs_of_some):
        assert all(found.values()), found


def test_a_sentence_is_the_same_for_its_seed_and_reads_back():
    for seed in range(20):
        words = draw(seed)
        assert parse(" ".join(map(str, words))) == words == draw(seed)
