"""Work goes to the stream that does it."""

from helpers.before_after import before_after
from helpers.graphs import COSTS, TWO, TWO_BY_TWO, one_bucket
from helpers.stages import lowered

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.graph.edit import is_collective
from fxcomp.graph.info import info
from fxcomp.graph.ops import TURN
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.passes.assign_streams import assign_streams
from fxcomp.plan.kinds import Stream

HIERARCHICAL = "reduce_scatter@intra > compress(int8)@cpu > all_gather@inter > decompress@cpu > all_gather@intra"


def test_offloaded_compression_runs_on_the_cpu(golden):
    plan = one_bucket(HIERARCHICAL)
    gm = annotate_costs(lowered(plan, TWO_BY_TWO), COSTS, TWO_BY_TWO)
    text, _ = before_after(assign_streams, gm, TWO_BY_TWO)
    golden("assign_streams/hierarchical_cpu.txt", text)


def test_all_ranks_of_one_host_speak_over_its_own_link():
    plan = one_bucket("all_reduce@world")
    one_host = Cluster(1, 2, intra=Link(5.0, 5.0), inter=Link(25.0, 0.125))
    for cluster, stream in ((one_host, Stream.INTRA), (TWO, Stream.INTER)):
        gm = assign_streams(lowered(plan, cluster), cluster)
        assert [info(n).stream for n in gm.graph.nodes if is_collective(n)] == [stream]


def test_work_on_payloads_goes_where_the_payloads_are():
    forwarded = (
        "compress(int8(block=2))@{0} > all_to_all@intra > all_to_all@inter > all_gather@inter > all_gather@intra"
        " > decompress@{0}"
    )
    for device, stream in (("gpu", Stream.COMPUTE), ("cpu", Stream.CPU)):
        gm = assign_streams(lowered(one_bucket(forwarded.format(device)), TWO_BY_TWO), TWO_BY_TWO)
        assert [info(n).stream for n in gm.graph.nodes if n.target is TURN] == [stream]
        levels = [info(n).stream for n in gm.graph.nodes if is_collective(n)]
        assert levels == [Stream.INTRA, Stream.INTER, Stream.INTER, Stream.INTRA]
