"""Write docs/strategies.md from the grammar, the rules and the meaning of strategies.

    PYTHONPATH=tests python docs/make/describe_strategies.py > docs/strategies.md

Errors come from `Strategy.parse`, pictures from `strategy_meaning` for four ranks, bytes from the bound routes.
`strategy_shapes.py` has the prose of the pictures.
"""

from __future__ import annotations

from textwrap import fill

from draw_strategies import ELEMENTS, cluster_of, names_of, picture, traffic_of
from strategy_shapes import CHAPTERS

from fxcomp.cluster.cluster import Level
from fxcomp.errors import BadStrategy
from fxcomp.plan.modes import AT_MOMENTA, ENTRIES, Entry, Mode
from fxcomp.plan.strategy import DENSE, Strategy

WIDTH = 120

HEAD = """\
# Strategies

A strategy is the sequence of steps that averages one bucket of gradients over all ranks. This page lists the steps, the
rules, the common strategies with their traffic, and the candidates of each mode. Every rank runs the same steps:

    reduce_scatter@intra > compress(int4)@gpu > all_gather@inter > decompress@gpu > all_gather@intra

A strategy is legal if every rank ends with the mean of all ranks' gradients, each counted once, up to the errors of its
compressors. All ranks get the same bits.

## Steps

| step | does |
|---|---|
"""

STEPS = {
    "compress(int4)@gpu": "makes a payload of the local values, with any [compressor](compressors.md)",
    "decompress@gpu": "restores values from payloads. Several ranks' payloads of the same values become their mean",
    "propose(powersgd(4))@gpu": "makes this rank's proposal, for example of a basis. The next all_reduce sums the"
    " proposals, so all ranks agree",
    "all_reduce@world": "sums the values; every rank gets the sum",
    "reduce_scatter@world": "cuts the bucket into shards; every rank gets the sum of its shard",
    "reduce@world": "sums the values; the first rank gets the sum",
    "all_gather@world": "gives every rank the payloads of all ranks, or all shards of a cut bucket",
    "all_to_all@world": "cuts the bucket like reduce_scatter, without a sum: every rank gets all payloads of its shard",
    "gather@world": "gives the first rank the payloads of all ranks",
    "broadcast@world": "gives every rank the result of the first rank, after reduce or gather",
}
"""One of each kind, and what it does."""

LEVELS = """
compress and decompress name a device: `@gpu` is the device that computes the gradients, `@cpu` the host's processor,
which works in parallel on copies. Without a GPU, `@gpu` is the main thread and `@cpu` a thread pool, and reports print
`@main` and `@pool`. Both spellings are accepted. A collective names its level: the ranks that take part. Dense values
are sent in the type of the gradients.

| level | ranks that meet | on 2 racks of 2 hosts of 2 ranks |
|---|---|---|
"""

LEVEL_WORDS = {
    Level.WORLD: "all",
    Level.INTRA: "the ranks of a host",
    Level.INTER: "the ranks with the same place in their hosts",
    Level.RACK: "the ranks of one rack with the same place in their hosts",
    Level.RACKS: "the ranks with the same place in their racks",
}

CUTS = """
Once the sum is complete, later steps undo earlier ones in reverse order: all_gather undoes reduce_scatter and
all_to_all, broadcast undoes reduce and gather. Shards are as equal as possible, without padding, and never cut a
compressor's block.

A strategy that ends with `shards` leaves each rank its own shard of the mean:
`compress(int4)@gpu > all_to_all@world > decompress@gpu > shards`. Only
[`compress_reduce_scatter`](sharding.md#plain-fsdp) follows such plans; it cuts along the rows of each parameter, with
padding, as `fully_shard` does.

## Rules

A strategy that breaks a rule is refused with an error such as:

"""

BROKEN = (
    "compress(int8) > all_reduce@world > decompress",
    "all_reduce@world > all_reduce@inter",
    "reduce_scatter@intra > all_reduce@inter",
    "all_gather@world",
    "compress(int8) > decompress > all_reduce@world",
    "compress(bf16) > all_to_all@intra > all_reduce@inter > all_gather@intra > decompress",
    "compress(powersgd(4)) > all_reduce@world > decompress",
    "reduce_scatter@intra > propose(powersgd(4)) > all_reduce@inter > compress(powersgd(4)) > all_reduce@inter"
    " > decompress > all_gather@intra",
)
"""Strategies that break a rule."""

READING = """
## Reading the pictures

Unless a picture shows otherwise, ranks a and b share one host, c and d another. A column is a rank. A line shows the
values of each rank after a step: the ranks whose gradients they contain, and a bar for the part of the bucket.

    ab   ██··     the sum of a's and b's gradients, for the first half of the bucket
    a,b  ▒▒▒▒     separate payloads of a and b for the whole bucket: decompressing takes their mean
    abcd ▒▒▒▒     a payload of the sum of all four

*rank* is the number of bytes that the busiest rank sends, and *uplink* the number that the busiest host sends to other
hosts, both divided by the bucket's dense bytes. all_reduce is a ring ({ring:.2f} dense); other collectives send
directly, as over gloo. *Latencies* count rounds of dependent messages: one for a direct collective, 2(p - 1) for a ring
of p ranks. *Error* is |applied - mean|² / |mean|² for independent Gaussian gradients, without error feedback.
With error feedback, each compression has a *slot* with a residual. The residuals of all ranks, times their *weights*,
sum to the difference between the exact and the applied mean.

Numbers are for a bucket of {elements:,} values.
"""

MODES = """
## Strategies of each mode

Every mode offers dense buckets, flat or by level, and the compressors below on either device. Strategies with a second
shot need three ranks or more. *Vectors* are buckets of biases and norms, *both* are buckets that mix them with
matrices. With `steps=`, `aggressive` also offers [momenta](where_the_mean_stands.md).

| mode | first shot | second shot | for | why |
|---|---|---|---|---|
"""


FOOT = """
Generated by `PYTHONPATH=tests python docs/make/describe_strategies.py`. Edit that file or `strategy_shapes.py`.
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
    return "".join([*parts, MODES, *_modes(), FOOT])


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
    rows = [f"| `{text}` | {problem_of(error)} |\n" for text, error in refusals[1:]]
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


def _modes() -> list[str]:
    rows: list[str] = []
    known: set[Entry] = set()
    for mode, entries in ENTRIES.items():
        fresh = [entry for entry in entries if entry not in known]
        known.update(fresh)
        if len(fresh) < len(entries):
            buckets = "all" if mode is Mode.LOSSY else "as in `balanced`"
            rows.append(f"| `{mode.value}` | the entries of `balanced` | | {buckets} | |\n")
        if not entries:
            exact = "`exact_bf16`, `exact_fp16` | none, in three ranks or more | casts of 16 bits | half, no error"
            rows.append(f"| `{mode.value}` | {exact} |\n")
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
