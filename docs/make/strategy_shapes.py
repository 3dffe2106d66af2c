"""The strategies that docs/strategies.md draws, with their descriptions."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    title: str
    words: str
    strategy: str
    cluster: str = "2x2"


class Chapter(NamedTuple):
    title: str
    words: str
    shapes: tuple[Shape, ...]


CHAPTERS = (
    Chapter(
        "All ranks at once",
        "Flat strategies ignore hosts. They suit hosts with one rank, and links inside and between hosts that are"
        " alike. Otherwise every rank of a host sends its own bytes over the shared uplink.",
        (
            Shape("Dense", "The strategy of DistributedDataParallel.", "all_reduce@world"),
            Shape(
                "One shot",
                "Every rank gets the payloads of all ranks and decompresses them. There is one compression, one"
                " latency and one error. Bytes grow with the number of ranks: if a payload has the share b of the"
                " dense bytes, one shot sends more than a dense ring from 2/b ranks on.",
                "compress(int8)@gpu > all_gather@world > decompress@gpu",
            ),
            Shape(
                "One shot of a linear compressor",
                "Linear payloads are summed by the network, which rounds while it adds. Bytes do not grow with the"
                " number of ranks. `powersgd(4)` is linear once the ranks agree on a basis: `propose(powersgd(4))@gpu"
                " > all_reduce@world` comes first.",
                "compress(bf16)@gpu > all_reduce@world > decompress@gpu",
            ),
            Shape(
                "Two shots",
                "Every rank owns a shard: it takes the mean of all payloads of the shard, compresses it and sends it"
                " to all. Bytes do not grow with the number of ranks. There are two errors and two residuals. The"
                " errors of the first shot average out over the ranks; the error of the second does not, so it gets"
                " more bits. The owner also decompresses its own payload, so that all ranks end with the same bits."
                " Either shot may be dense, and the owner may forward payloads without decompressing them.",
                "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world"
                " > decompress@gpu",
            ),
        ),
    ),
    Chapter(
        "Host by host",
        "Links inside a host are fast; the uplink between hosts is slow and shared. So the ranks of a host sum their"
        " gradients first. Each rank then has a shard of the host's sum, and exchanges it with the ranks at the same"
        " place in the other hosts. The uplink carries the bucket once per host. With racks, the sum goes on inside"
        " racks (`reduce_scatter@rack`), and the exchange between racks (`@racks`) can be compressed.",
        (
            Shape(
                "Dense",
                "The fewest dense bytes between hosts.",
                "reduce_scatter@intra > all_reduce@inter > all_gather@intra",
            ),
            Shape(
                "One shot between hosts",
                "Dense inside hosts, compressed between them. On two hosts, two shots do not send fewer bytes. A linear"
                " compressor can compress the gradient once, first, and the network sums its payloads at all levels.",
                "reduce_scatter@intra > compress(int4)@gpu > all_gather@inter > decompress@gpu > all_gather@intra",
            ),
            Shape(
                "Two shots between hosts, payloads forwarded",
                "Payloads from other hosts are forwarded inside the host and decompressed once, at the end. This"
                " sends less than one shot from three hosts on. Where links inside hosts are slow, sums inside them can"
                " be compressed too, with one more error and one more residual.",
                "reduce_scatter@intra > compress(int4)@gpu > all_to_all@inter > decompress@gpu > compress(int8)@gpu"
                " > all_gather@inter > all_gather@intra > decompress@gpu",
            ),
        ),
    ),
    Chapter(
        "By the first rank",
        "Rooted strategies give the work to the first rank of a group. Its link carries all bytes, so they are rarely"
        " fast. They also work for hosts with different numbers of ranks.",
        (
            Shape(
                "Gathered and passed on",
                "The first rank collects all payloads and forwards them: one compression, one error.",
                "compress(int8)@gpu > gather@world > broadcast@world > decompress@gpu",
            ),
            Shape(
                "Hosts that differ",
                "Two ranks on one host, one on the other. The first ranks of the hosts exchange payloads.",
                "reduce@intra > compress(int8)@gpu > all_gather@inter > decompress@gpu > broadcast@intra",
                "2+1",
            ),
        ),
    ),
)
