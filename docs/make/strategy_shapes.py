"""The shapes that docs/strategies.md draws, and what it says of each."""

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
        "Flat strategies ignore hosts. They are right where a host has one rank, or where links inside and between"
        " hosts are alike. Otherwise each rank of a host sends its own bytes over the same uplink.",
        (
            Shape("Dense", "As DistributedDataParallel does it.", "all_reduce@world"),
            Shape(
                "One shot",
                "Every rank gets everybody's payload, and decompresses them all. There is one compression, one latency"
                " and one error. But a rank sends its payload to each other rank, so bytes grow with the number of"
                " ranks. If a payload has the share b of the dense bytes, one shot sends more than a dense ring from"
                " 2/b ranks on.",
                "compress(int8)@gpu > all_gather@world > decompress@gpu",
            ),
            Shape(
                "One shot of a linear compressor",
                "Payloads that may be added travel like a dense bucket: bytes do not grow with the number of ranks. The"
                " network rounds while it adds. `powersgd(4)` is linear once the ranks agree on a basis for each"
                " matrix: `propose(powersgd(4))@gpu > all_reduce@world` comes first.",
                "compress(bf16)@gpu > all_reduce@world > decompress@gpu",
            ),
            Shape(
                "Two shots",
                "Every rank owns a shard. It gets everybody's payload of its shard and takes the mean. Then it"
                " compresses the mean again and gives it to all. Bytes do not grow with the number of ranks. There are"
                " two errors, and two residuals: a rank keeps what it left out of its gradient, an owner what it left"
                " out of its mean. The errors of the first shot average out over the ranks; those of the second do not,"
                " so it gets more bits. The owner decompresses what it has sent, as everybody does, so that all ranks"
                " end with the same bits.",
                "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world"
                " > decompress@gpu",
            ),
            Shape(
                "Two shots with one compressor",
                "The fewest bytes, the larger error.",
                "compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int4)@gpu > all_gather@world"
                " > decompress@gpu",
            ),
            Shape(
                "Payloads of shards, forwarded",
                "The owner does not decompress. It passes its pile of payloads on, and every rank takes the means."
                " There is one compression and one error, as in one shot, and a few bytes more. The tree of Espresso"
                " has this shape.",
                "compress(int8)@gpu > all_to_all@world > all_gather@world > decompress@gpu",
            ),
            Shape(
                "Only the first shot compressed",
                "The mean travels dense, and nothing is lost of it.",
                "compress(int8)@gpu > all_to_all@world > decompress@gpu > all_gather@world",
            ),
            Shape(
                "Only the second shot compressed",
                "Gradients are added dense, and only their mean has an error, once.",
                "reduce_scatter@world > compress(int8)@gpu > all_gather@world > decompress@gpu",
            ),
        ),
    ),
    Chapter(
        "Host by host",
        "Links inside a host are fast, the uplink between hosts is slow and shared. So the ranks of a host first add up"
        " among themselves; each then has a shard of the host's sum, and meets the ranks with the same place in the"
        " other hosts. The uplink carries the bucket once, not once for each rank.",
        (
            Shape(
                "Dense",
                "The fewest dense bytes between hosts.",
                "reduce_scatter@intra > all_reduce@inter > all_gather@intra",
            ),
            Shape(
                "One shot between hosts",
                "Dense inside, compressed between. On two hosts two shots send no less.",
                "reduce_scatter@intra > compress(int4)@gpu > all_gather@inter > decompress@gpu > all_gather@intra",
            ),
            Shape(
                "Two shots between hosts, payloads forwarded",
                "Payloads from the other hosts are passed on inside the host as they are, and decompressed once, at the"
                " end. From three hosts on this sends less than one shot.",
                "reduce_scatter@intra > compress(int4)@gpu > all_to_all@inter > decompress@gpu > compress(int8)@gpu"
                " > all_gather@inter > all_gather@intra > decompress@gpu",
            ),
            Shape(
                "Linear payloads, all the way",
                "The gradient is compressed once. Its payload travels over all levels, inside hosts too; the network"
                " adds.",
                "compress(bf16)@gpu > reduce_scatter@intra > all_reduce@inter > all_gather@intra > decompress@gpu",
            ),
            Shape(
                "Compressed inside hosts too",
                "For slow links inside hosts. Each sum is compressed again, so there is one more error and one more"
                " residual.",
                "compress(int8)@gpu > all_to_all@intra > decompress@gpu > compress(int4)@gpu > all_to_all@inter"
                " > decompress@gpu > compress(int8)@gpu > all_gather@inter > all_gather@intra > decompress@gpu",
            ),
            Shape(
                "Compressed inside, and forwarded between",
                "One compression of the gradients serves both levels: payloads are dealt out twice before they are"
                " decompressed.",
                "compress(int8)@gpu > all_to_all@intra > all_to_all@inter > decompress@gpu > compress(int8)@gpu"
                " > all_gather@inter > all_gather@intra > decompress@gpu",
            ),
        ),
    ),
    Chapter(
        "By the first rank",
        "Rooted strategies give the work to the first rank of a group. Its link carries what others share elsewhere, so"
        " they are rarely fast. They need no shards: they work where hosts have different numbers of ranks.",
        (
            Shape("Dense", "One rank adds for all.", "reduce@world > broadcast@world"),
            Shape(
                "Gathered and passed on",
                "The first rank collects the payloads and passes all of them on: one compression, one error.",
                "compress(int8)@gpu > gather@world > broadcast@world > decompress@gpu",
            ),
            Shape(
                "Gathered, added and compressed again",
                "The first rank owns the whole bucket, as in two shots each rank owns a shard. Its residual is as large"
                " as the bucket.",
                "compress(int8)@gpu > gather@world > decompress@gpu > compress(int8)@gpu > broadcast@world"
                " > decompress@gpu",
            ),
            Shape(
                "Hosts that differ",
                "Two ranks on one host, one on the other. The first ranks of the hosts meet; b has nothing to send"
                " between hosts.",
                "reduce@intra > compress(int8)@gpu > all_gather@inter > decompress@gpu > broadcast@intra",
                "2+1",
            ),
        ),
    ),
    Chapter(
        "Rack by rack",
        "The same idea goes on above the hosts: add up inside hosts, then inside racks, and only then between racks."
        " The pictures show the first four of eight ranks, which are one rack.",
        (
            Shape(
                "Dense",
                "A rack's uplink carries the bucket once.",
                "reduce_scatter@intra > reduce_scatter@rack > all_reduce@racks > all_gather@rack > all_gather@intra",
                "2x2x2",
            ),
            Shape(
                "One shot between racks",
                "Compressed where the link is slowest, dense below.",
                "reduce_scatter@intra > reduce_scatter@rack > compress(int4)@gpu > all_gather@racks > decompress@gpu"
                " > all_gather@rack > all_gather@intra",
                "2x2x2",
            ),
        ),
    ),
)
