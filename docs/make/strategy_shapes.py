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
        "Flat strategies ignore hosts. They suit hosts with one rank, and clusters whose links inside and between hosts"
        " are alike. Elsewhere the ranks of a host all send their own bytes over the shared uplink.",
        (
            Shape("Dense", "The strategy of DistributedDataParallel.", "all_reduce@world"),
            Shape(
                "One shot",
                "Every rank gets the payloads of all ranks and decompresses them. Bytes grow with the number of ranks:"
                " if a payload has the share b of the dense bytes, one shot sends more than a dense ring from 2/b ranks"
                " on. The network sums the payloads of linear compressors, so their bytes do not grow:"
                " `compress(bf16)@gpu > all_reduce@world > decompress@gpu`. For `powersgd(4)`,"
                " `propose(powersgd(4))@gpu > all_reduce@world` comes first.",
                "compress(int8)@gpu > all_gather@world > decompress@gpu",
            ),
            Shape(
                "Two shots",
                "Every rank owns a shard. It takes the mean of all payloads of the shard, compresses this mean and"
                " sends it to all ranks. Bytes do not grow with the number of ranks. The errors of the first shot"
                " average out over the ranks. The error of the second shot does not, so this shot uses int8 here. The"
                " owner also decompresses its own payload, so that all ranks end with the same bits. Either shot may be"
                " dense, and the owner may forward payloads without decompressing them.",
                "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world"
                " > decompress@gpu",
            ),
        ),
    ),
    Chapter(
        "Host by host",
        "Links inside a host are fast; the uplink between hosts is slow and shared. So the ranks of a host sum their"
        " gradients first. Each rank then has a shard of the host's sum, and exchanges it with the ranks at the same"
        " place in the other hosts. The uplink carries the bucket once per host. With racks, ranks next sum inside"
        " their rack (`reduce_scatter@rack`), and the exchange between racks (`@racks`) can be compressed.",
        (
            Shape(
                "Dense",
                "The fewest dense bytes between hosts.",
                "reduce_scatter@intra > all_reduce@inter > all_gather@intra",
            ),
            Shape(
                "One shot between hosts",
                "Values are dense inside hosts and compressed between them. From three hosts on, two shots send less."
                " A linear compressor can compress the gradient before all sums; then the network sums its payloads"
                " at all levels. If links inside hosts are slow, the sum inside hosts can be compressed too, which"
                " adds an error and a residual.",
                "reduce_scatter@intra > compress(int4)@gpu > all_gather@inter > decompress@gpu > all_gather@intra",
            ),
        ),
    ),
    Chapter(
        "By the first rank",
        "In rooted strategies the first rank of a group does the work. Its link carries all bytes, so rooted strategies"
        " are rarely fast. They also work for hosts with different numbers of ranks.",
        (
            Shape(
                "Hosts that differ",
                "The first rank collects all payloads and forwards them. With"
                " `all_gather@inter` in place of gather and broadcast, the first ranks of the hosts exchange payloads"
                " (rank 2.25, uplink 0.25).",
                "reduce@intra > compress(int8)@gpu > gather@inter > broadcast@inter > decompress@gpu > broadcast@intra",
                "2+1",
            ),
        ),
    ),
)
