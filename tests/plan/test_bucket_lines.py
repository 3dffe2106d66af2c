"""The lines of a bucket: what is done to it, where, and over how many bytes."""

from helpers.workloads import cluster

from fxcomp.plan.kinds import ElementType, Stream
from fxcomp.plan.lines import LineKind, lines_of, sent
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Strategy

PAIRS = cluster(2, 2, "1gbit")
AROUND_INT8 = "reduce_scatter@intra > compress(int8)@{0} > all_gather@inter > decompress@{0} > all_gather@intra"


def written(strategy: str, kind: ElementType = ElementType.F32, rank: int = 0) -> list[list[str]]:
    """Each line's kind and bytes, by stage."""
    route = route_of(Strategy.parse(strategy), [(1024, 8)], PAIRS, rank, kind)
    return [[f"{line.kind.value} {line.size}" for line in stage] for stage in lines_of(route)]


def test_a_dense_bucket_is_packed_and_sent():
    assert written("all_reduce@world") == [["pack 32768", "send 32768"], [], []]


def test_values_are_cast_around_a_compressor():
    payload = 4096 + 4 * 4096 // 512
    assert written(AROUND_INT8.format("gpu"), ElementType.BF16) == [
        ["pack 16384", "send 16384"],
        ["cast 12288", f"compress {payload}", f"send {payload}"],
        ["decompress 16384", "cast 12288", "send 8192"],
        [],
        [],
    ]


def test_the_host_s_pool_is_reached_by_a_copy_and_starts_what_it_holds():
    route = route_of(Strategy.parse(AROUND_INT8.format("cpu")), [(1024, 8)], PAIRS)
    _, offloaded, arrived, *_ = lines_of(route)
    assert [(line.kind, line.stream) for line in (*offloaded, *arrived)] == [
        (LineKind.D2H, Stream.D2H),
        (LineKind.COMPRESS, Stream.CPU),
        (LineKind.SEND, Stream.CPU),
        (LineKind.DECOMPRESS, Stream.CPU_ARRIVING),
        (LineKind.H2D, Stream.H2D),
        (LineKind.SEND, Stream.COMPUTE),
    ]


def test_proposals_travel_before_payloads():
    strategy = (
        "propose(powersgd(2))@gpu > all_reduce@world > compress(powersgd(2))@gpu > all_reduce@world > decompress@gpu"
    )
    lines = sent(lines_of(route_of(Strategy.parse(strategy), [(1024, 8)], PAIRS)))
    assert [(line.kind, line.size) for line in lines] == [
        (LineKind.AGREE, 4 * 2 * 1024),
        (LineKind.SEND, 4 * 2 * 8),
    ]


def test_a_group_of_one_sends_nothing_but_has_its_line():
    alone = cluster(2, 1, "1gbit")
    route = route_of(Strategy.parse(AROUND_INT8.format("gpu")), [(1024, 8)], alone)
    assert [line.send.ranks for line in sent(lines_of(route))] == [1, 2, 1]
