"""Write docs/strategies.md from the grammar, the rules and the meaning of strategies.

    PYTHONPATH=tests python docs/make/describe_strategies.py > docs/strategies.md

Errors are what `Strategy.parse` raises, pictures what `strategy_meaning` says of four ranks, bytes those of the bound
routes. Words are here and in `strategy_shapes.py`; all else is made.
"""

from __future__ import annotations

from collections import Counter
from textwrap import fill

from draw_strategies import ELEMENTS, cluster_of, names_of, picture, traffic_of
from helpers.strategy_space import Space, published_space, strategies_in, ways_through
from strategy_shapes import CHAPTERS

from fxcomp.cluster.cluster import Level
from fxcomp.compressors import BF16, TopK
from fxcomp.errors import BadStrategy
from fxcomp.plan.modes import AT_MOMENTA, ENTRIES, Entry, Mode
from fxcomp.plan.strategy import DENSE, Device, Strategy

WIDTH = 120

HEAD = """\
# Strategies

Made by `PYTHONPATH=tests python docs/make/describe_strategies.py`: edit that file or `strategy_shapes.py` beside it,
not this page.

DistributedDataParallel all-reduces a bucket of gradients. A *strategy* reaches the same end by more steps, and sends
fewer bytes over the slow links. It is a line of steps, and every rank takes them:

    reduce_scatter@intra > compress(int4)@gpu > all_gather@inter > decompress@gpu > all_gather@intra

A strategy is legal if every rank ends with the dense mean of all ranks' gradients, with each gradient in it once.
Compressors round, so the mean lacks what they leave out. All ranks get the same bits.

## Steps

| step | does |
|---|---|
"""

STEPS = {
    "compress(int4)@gpu": "makes a payload of the values that a rank holds, by any compressor of "
    "[this list](compressors.md)",
    "decompress@gpu": "makes values of payloads again. Payloads of several ranks for the same values become their mean",
    "propose(powersgd(4))@gpu": "makes a proposal, which the all_reduce that follows reduces. Ranks so agree on "
    "something before they compress, such as one basis for all",
    "all_reduce@world": "adds up what the ranks hold; every rank gets the sum",
    "reduce_scatter@world": "cuts the bucket into a shard for each rank; every rank gets the sum of its shard",
    "reduce@world": "adds up what the ranks hold; the first rank gets the sum",
    "all_gather@world": "gives every rank what all have: their payloads, or, after a step that has cut the bucket, the "
    "shards",
    "all_to_all@world": "cuts the bucket like reduce_scatter, but nothing is added: every rank gets all payloads of "
    "its shard",
    "gather@world": "gives the first rank the payloads of all",
    "broadcast@world": "gives every rank what the first one has, after reduce or gather",
}
"""One of each kind, and what it does."""

LEVELS = """
A compression or a decompression names its device. `@gpu` is the device that computes gradients; `@cpu` is the host's
processor, which works beside it. Values are copied there and back. Without a GPU, `gpu` is the main thread and `cpu`
the pool. Reports print `@main` and `@pool` there; both spellings are read everywhere. Saved plans have `@gpu` and
`@cpu`. A collective names its level: the ranks that meet in it.

The gradients of a bucket have one type. Its dense values travel in that type, before compressors and after them.

| level | ranks that meet | on 2 racks of 2 hosts of 2 ranks |
|---|---|---|
"""

LEVEL_WORDS = {
    Level.WORLD: "all",
    Level.INTRA: "the ranks of a host",
    Level.INTER: "the ranks with the same place in their hosts, one of each host",
    Level.RACK: "of these, the ones in one rack",
    Level.RACKS: "the ranks with the same place in their racks, one of each rack",
}

CUTS = """
Once the sum is complete, steps that cut the bucket are undone in the reverse order: reduce_scatter and all_to_all by
all_gather, reduce and gather by broadcast.

Shards are as equal as possible and never cut a compressor's block. Leading dense shards may be cut anywhere. Of a small
bucket some shards are empty. Nothing is padded.

A strategy that ends with the word `shards` leaves each rank its own shard of the mean, as in
`compress(int4)@gpu > all_to_all@world > decompress@gpu > shards`. [`compress_reduce_scatter`](sharding.md#plain-fsdp)
follows such plans, and cuts as `fully_shard` does: along the rows of each parameter, with padding. Nothing else takes
them.

## Rules

A strategy that breaks a rule is refused. The error names the step, what is held before it, and what would fit:

"""

BROKEN = (
    "compress(int8) > all_reduce@world > decompress",
    "all_reduce@world > all_reduce@inter",
    "reduce_scatter@intra > all_reduce@inter",
    "reduce_scatter@intra > all_gather@intra > all_reduce@inter",
    "all_gather@world",
    "all_to_all@world > all_gather@world",
    "reduce@world > all_gather@world",
    "compress(int8) > decompress > all_reduce@world",
    "decompress > all_reduce@world",
    "compress(int8) > compress(int4) > all_gather@world > decompress",
    "compress(bf16) > all_to_all@intra > all_reduce@inter > all_gather@intra > decompress",
    "compress(int8) > all_gather@world",
    "propose(int8) > all_reduce@world > compress(int8) > all_gather@world > decompress",
    "compress(powersgd(4)) > all_reduce@world > decompress",
    "propose(powersgd(4)) > compress(powersgd(4)) > all_reduce@world > decompress",
    "propose(powersgd(4)) > all_reduce@world > all_reduce@world",
    "propose(powersgd(4)) > all_reduce@world > compress(powersgd(4)) > reduce_scatter@world > all_gather@world"
    " > decompress",
    "propose(powersgd(4)) > all_reduce@intra > compress(powersgd(4)) > all_reduce@world > decompress",
    "reduce_scatter@intra > propose(powersgd(4)) > all_reduce@inter > compress(powersgd(4)) > all_reduce@inter"
    " > decompress > all_gather@intra",
)
"""One strategy for each rule that can be broken."""

READING = """
## Reading the pictures

There are four ranks, a and b on one host, c and d on another, unless a picture says otherwise. A column is a rank. A
line says what each rank holds after a step: whose gradients, and a bar for the part of the bucket.

    ab   ██··     the sum of a's and b's gradients, for the first half of the bucket
    a,b  ▒▒▒▒     a's payload and b's, side by side, for the whole bucket: decompressing takes their mean
    abcd ▒▒▒▒     a payload of the sum of all four

*rank* is what the busiest rank sends in a step, *uplink* what the busiest host sends to other hosts. Both are shares of
the bucket's dense bytes; a dense ring sends {ring:.2f} of them. All_reduce is a ring here. All other collectives send
directly from rank to rank, as fxcomp does over gloo. *Latencies* count rounds of messages that wait for each other: one
for a direct collective, 2(p - 1) for a ring of p ranks.

*Error* is the relative squared error of the mean, |applied - mean|² / |mean|², without error feedback, for independent
Gaussian gradients. With error feedback each compression has a *slot*, which keeps its residual and adds it at the next
step. The residuals of all ranks, each times its *weight*, add up to what the mean still lacks.

Numbers are for a bucket of {elements:,} values.
"""

COUNTS = """
## Number of strategies

A space of strategies has levels, collectives, compressors, devices, and a limit on the number of compressions;
`tests/helpers/strategy_space.py` lists every strategy of one. The decision tree of Espresso (Wang et al., EuroSys 2023)
is such a space: strategies go to all ranks at once or host by host, the network never adds payloads, and inside hosts
no collective gives every rank the whole sum.

| space | strategies | compressed 0, 1, 2, ... times |
|---|---|---|
"""

MODES = """
## Strategies of each mode

Every mode offers dense buckets, over all ranks or level by level. It also offers the compressors below, in one shot or
in two, flat or by level, on either device. Two shots need three ranks or more. *Vectors* means buckets of biases and
norms, *both* buckets that mix them with matrices. `aggressive` offers [momenta](where_the_mean_stands.md) too, where
the length of the job is given.

| mode | first | second shot | for | why |
|---|---|---|---|---|
"""


def describe() -> str:
    """The whole page."""
    steps = "".join(f"| `{step}` | {words} |\n" for step, words in STEPS.items())
    ring = max(sent[0] for sent in traffic_of(DENSE, cluster_of("2x2")))
    parts = [HEAD + steps, LEVELS + _levels(), CUTS + _errors(), READING.format(ring=ring, elements=ELEMENTS)]
    for chapter in CHAPTERS:
        parts.append(f"\n## {chapter.title}\n\n{fill(chapter.words, WIDTH)}\n")
        for shape in chapter.shapes:
            drawn = picture(Strategy.parse(shape.strategy), cluster_of(shape.cluster))
            parts.append(f"\n### {shape.title}\n\n{fill(shape.words, WIDTH)}\n\n```text\n{drawn}\n```\n")
    return "".join([*parts, COUNTS, *_counts(), MODES, *_modes()])


def _levels() -> str:
    racks = cluster_of("2x2x2")
    lines: list[str] = []
    for level, words in LEVEL_WORDS.items():
        groups = ", ".join(names_of(group) for group in racks.groups(level))
        lines.append(f"| `@{level.value}` | {words} | {groups} |\n")
    return "".join(lines)


def _errors() -> str:
    refusals = [(text, _refusal(text)) for text in BROKEN]
    whole = "\n".join(f"    {line}" for line in refusals[0][1].splitlines())
    rows = [f"| `{text}` | {problem_of(error)} |\n" for text, error in refusals]
    return f"{whole}\n\n| strategy | why it is refused |\n|---|---|\n{''.join(rows)}"


def _refusal(text: str) -> str:
    try:
        Strategy.parse(text)
    except BadStrategy as error:
        return str(error)
    raise AssertionError(f"{text} is legal")


def problem_of(error: str) -> str:
    """Cut the step and the reason out of an error."""
    first = error.splitlines()[0]
    return first.partition(" over all ranks once: ")[2].replace(", does not fit: ", ": ").removesuffix(".")


def _counts() -> list[str]:
    sparse = (TopK(0.01),)
    spaces = {
        "Espresso's tree, one compressor": published_space(*sparse),
        "the same, each compression and decompression on either device": published_space(
            *sparse, devices=tuple(Device)
        ),
        "two levels, one compressor": Space(ways=ways_through(cluster_of("2x2")), compressors=sparse),
        "two levels, one linear compressor": Space(ways=ways_through(cluster_of("2x2")), compressors=(BF16(),)),
        "three levels, one compressor": Space(ways=ways_through(cluster_of("2x2x2")), compressors=sparse),
    }
    rows: list[str] = []
    for name, space in spaces.items():
        counts = Counter(len(strategy.compressors) for strategy in strategies_in(space))
        by_number = ", ".join(f"{counts[number]:,}" for number in sorted(counts))
        rows.append(f"| {name} | {counts.total():,} | {by_number} |\n")
    return rows


def _modes() -> list[str]:
    rows: list[str] = []
    known: set[Entry] = set()
    for mode, entries in ENTRIES.items():
        fresh = [entry for entry in entries if entry not in known]
        known.update(fresh)
        if len(fresh) < len(entries):
            buckets = "all" if mode is Mode.LOSSY else "as there"
            rows.append(f"| `{mode.value}` | what `balanced` offers | | {buckets} | |\n")
        if not entries:
            rows.append(f"| `{mode.value}` | nothing: every bucket is dense | | | |\n")
        for entry in fresh:
            buckets = ", ".join(["matrices", *["vectors"] * entry.vectors, *["both"] * entry.mixed])
            buckets = "all" if mode is Mode.LOSSY else buckets
            rows.append(_row(mode, entry, buckets))
        if mode is Mode.AGGRESSIVE:
            rows += [_row(mode, entry, "matrices' momenta") for entry in AT_MOMENTA]
    return rows


def _row(mode: Mode, entry: Entry, buckets: str) -> str:
    second = f"`{entry.second}`" if entry.second else ""
    return f"| `{mode.value}` | `{entry.first}` | {second} | {buckets} | {entry.reason} |\n"


if __name__ == "__main__":
    print(describe(), end="")
