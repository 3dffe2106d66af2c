"""Tensors that do not fit are refused before a kernel gets raw pointers, and under `python -O` too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fxcomp_more import RandomK
from helpers.compressor_cases import WITH_KERNELS
from helpers.ranks import run_alone
from torch import Tensor

from fxcomp.compressors import Int8, PowerSGD, Sidco, TopK, parse_compressor
from fxcomp.errors import BadTensor, FxcompError

AGREEING = PowerSGD(1, columns=(3,))
ON_META = torch.zeros(3, device="meta")
RANDOM = Int8(stochastic=True)
SELECTING = ("topk(0.01)", "sidco(0.01)")


def _payload(text: str, size: int) -> Tensor:
    compressor = parse_compressor(text)
    return torch.zeros(compressor.payload_elements((size,)), dtype=compressor.payload_dtype)


def _run(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Segments


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_a_segment_of_less_than_no_values_is_refused(name: str) -> None:
    op, parameters = {
        "int8": (torch.ops.fxcomp.int8_compress, (512, False)),
        "topk": (torch.ops.fxcomp.topk_compress, (0.01,)),
    }[name]
    with pytest.raises(BadTensor, match=r"(?s)segment 1 has -99995 values.*2 segments of 100000, -99995 .*0 or more"):
        op(torch.randn(5), None, [100_000, -99_995], *parameters)
    with pytest.raises(BadTensor, match="segment 1 has -99995 values"):
        op(torch.randn(5, device="meta"), None, [100_000, -99_995], *parameters)


def test_decoding_and_proposing_refuse_such_a_segment_too() -> None:
    int8 = parse_compressor("int8")
    with pytest.raises(BadTensor, match="segment 0 has -3 values"):
        int8.decode(_payload("int8", 5), 1, (-3, 8), torch.empty(5))
    with pytest.raises(BadTensor, match="segment 0 has -3 values"):
        AGREEING.propose(torch.zeros(5), None, (-3, 8), torch.zeros(1), torch.empty(1))
    with pytest.raises(BadTensor, match="segment 0 has -3 values"):
        torch.ops.fxcomp.int8_decompress(_payload("int8", 5), 1, [-3, 8], 512, False)
    with pytest.raises(BadTensor, match="segment 0 has -3 values"):
        torch.ops.fxcomp.powersgd_propose(torch.zeros(5, device="meta"), None, [-3, 8], 1, [3])


@pytest.mark.parametrize("text", SELECTING)
def test_more_values_than_an_int32_can_count_are_refused_before_there_is_a_bucket(text: str) -> None:
    compressor = parse_compressor(text)
    assert compressor.payload_elements((2**31 - 1,)) > 0
    with pytest.raises(FxcompError, match=r"(?s)from 2147483648 values: .*31 bits.*segment 1 of a bucket of 2.*int8"):
        compressor.payload_elements((7, 2**31))


# Tensors

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: TopK(0.01).encode(torch.zeros(9).double(), None, _payload("topk(0.01)", 9), (9,)),
        r"the bucket must be torch.float32, not torch.float64.*topk\(0.01\), for 1 segment of 9 values.*\.to\(torch",
    ),
    "size": (
        lambda: TopK(0.01).encode(torch.zeros(8), None, _payload("topk(0.01)", 9), (9,)),
        "the bucket must have 9 elements, not 8.*Make it for these segments",
    ),
    "layout": (
        lambda: TopK(0.01).encode(torch.zeros(18)[::2], None, _payload("topk(0.01)", 9), (9,)),
        r"the bucket must be contiguous.*Give it as \.contiguous\(\)",
    ),
    "device": (
        lambda: TopK(0.01).encode(torch.zeros(9), torch.zeros(9, device="meta"), _payload("topk(0.01)", 9), (9,)),
        r"the residual must be on cpu, not on meta.*Move it with \.to\('cpu'\)",
    ),
    "device of an op's residual": (
        lambda: torch.ops.fxcomp.topk_compress(torch.zeros(9), torch.zeros(9, device="meta"), [9], 0.01),
        r"tensors are on cpu and on meta.*Move them all with \.to\('cpu'\)",
    ),
    "device of an op's agreement": (
        lambda: torch.ops.fxcomp.powersgd_decompress(
            torch.zeros(3), 1, [9], 1, [3], agreed=torch.zeros(3, device="meta")
        ),
        "tensors are on cpu and on meta",
    ),
    "device of a payload": (
        lambda: TopK(0.01).decode(_payload("topk(0.01)", 9).to("meta"), 1, (9,), torch.zeros(9)),
        "the payloads must be on cpu, not on meta",
    ),
    "device of a state": (
        lambda: RANDOM.encode(
            torch.zeros(9), None, _payload(str(RANDOM), 9), (9,), torch.zeros(2, dtype=torch.int64, device="meta")
        ),
        "the state must be on cpu, not on meta",
    ),
    "device of an agreement": (
        lambda: AGREEING.decode(torch.zeros(3), 1, (9,), torch.zeros(9), ON_META),
        "the agreement must be on cpu, not on meta",
    ),
    "device of a proposal": (
        lambda: AGREEING.propose(torch.zeros(9), None, (9,), torch.zeros(3), ON_META),
        "the proposal must be on cpu, not on meta",
    ),
    "ranks": (
        lambda: TopK(0.01).decode(torch.zeros(0, dtype=torch.uint8), 0, (9,), torch.zeros(9)),
        "there is no mean over 0 ranks.*Give the number of ranks",
    ),
    "no state": (
        lambda: RANDOM.encode(torch.zeros(9), None, _payload(str(RANDOM), 9), (9,)),
        "int8 needs its state.*fresh_state",
    ),
    "no state to decode with": (
        lambda: RandomK(0.5).decode(_payload("randomk(0.5)", 9), 1, (9,), torch.zeros(9)),
        "randomk needs its state",
    ),
    "a state too many": (
        lambda: TopK(0.5).encode(torch.zeros(9), None, _payload("topk(0.5)", 9), (9,), torch.zeros(2)),
        "topk has no state.*Leave state= out",
    ),
    "no agreement": (
        lambda: AGREEING.decode(torch.zeros(3), 1, (9,), torch.zeros(9)),
        "powersgd needs the agreement of the ranks.*Give agreed=",
    ),
    "an agreement too many": (
        lambda: TopK(0.5).decode(_payload("topk(0.5)", 9), 1, (9,), torch.zeros(9), torch.zeros(1)),
        "topk works without an agreement.*Leave agreed= out",
    ),
    "another bucket's binding": (
        lambda: PowerSGD(4, columns=(7, 7)).payload_elements((1000,)),
        "is bound to 2 parameters, not to 1.*bound_to",
    ),
    "columns that leave some over": (
        lambda: PowerSGD(1, columns=(0, 64)).payload_elements((7, 1000)),
        "no matrix of 1000 values has rows of 64.*segment 1 of 2, of powersgd\\(1\\).*bound_to",
    ),
    "columns below zero": (
        lambda: PowerSGD(1, columns=(-10,)).proposal_elements((1000,)),
        "no matrix of 1000 values has rows of -10",
    ),
    "columns of nothing": (
        lambda: PowerSGD(1, columns=(10,)).state_elements(0),
        "no matrix of 0 values has rows of 10",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_does_not_fit_is_refused_with_what_where_and_what_to_do(case: str) -> None:
    call, text = CALLS[case]
    with pytest.raises(BadTensor, match=f"(?s){text}"):
        call()


# Payloads


@WITH_KERNELS
@pytest.mark.parametrize(
    ("text", "byte"),
    [("topk(0.01)", 0), ("topk(0.01)", 255), ("sidco(0.1)", 255)],
)
def test_a_damaged_payload_is_refused(text: str, byte: int) -> None:
    compressor = parse_compressor(text)
    with pytest.raises(BadTensor, match=r"(?s)names places outside.*2 payloads, for 1 segment of 1000.*same version"):
        compressor.decode(_payload(text, 1000).repeat(2).fill_(byte), 2, (1000,), torch.empty(1000))


# Without asserts


@pytest.mark.slow
@WITH_KERNELS
def test_asserts_are_not_what_refuses() -> None:
    code = """
import torch
from fxcomp.compressors import Int8, TopK
from fxcomp.errors import BadTensor

assert False, "this runs without asserts"
topk = TopK(0.01)
damaged = torch.zeros(topk.payload_elements((1000,)), dtype=torch.uint8)
out = torch.zeros(10_000_000)
for call in (
    lambda: Int8().decode(torch.zeros(8, dtype=torch.uint8), 1, (10_000_000,), out),
    lambda: topk.encode(torch.randn(10).double(), None, damaged, (1000,)),
    lambda: topk.encode(torch.zeros(1000), torch.zeros(1000, device="meta"), damaged, (1000,)),
    lambda: torch.ops.fxcomp.int8_compress(torch.randn(5), None, [100_000, -99_995], 512, False),
    lambda: topk.decode(damaged, 1, (1000,), torch.zeros(1000)),
):
    try:
        call()
        print("accepted")
    except BadTensor as error:
        print("payload" if "a payload names places" in str(error) else "tensor")
"""
    assert _run(code, "-O").split() == ["tensor"] * 4 + ["payload"]


# Forks


def compresses_in_a_child() -> bool:
    torch.set_num_threads(3)
    sidco, bucket, segments = Sidco(0.01), torch.randn(1_000_000), (1_000_000,)
    payload = torch.zeros(sidco.payload_elements(segments), dtype=torch.uint8)
    again = payload.clone()
    state = sidco.fresh_state(1_000_000, 1, 0)
    copy = state.clone()
    sidco.encode(bucket, None, payload, segments, state)
    child = os.fork()
    if child == 0:
        sidco.encode(bucket, None, again, segments, copy)
        os._exit(0 if bytes(again.numpy()) == bytes(payload.numpy()) else 1)
    return os.waitpid(child, 0)[1] == 0


@WITH_KERNELS
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_compresses_with_threads_of_its_own() -> None:
    """Only kernels run in the child: torch's own OpenMP threads do not survive a fork."""
    assert run_alone(compresses_in_a_child)
