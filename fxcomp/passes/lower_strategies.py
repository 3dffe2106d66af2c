"""Replace each bucket's collective by the steps of its strategy, in the order of its route.

      %pack_0             pack        f32[12]                   pack([%sum_1, %mm], 1.0)
    - %all_reduce_0       collective  f32[12]                   all_reduce(%pack_0, avg, world)
    - %wait_0             wait        f32[12]                   wait(%all_reduce_0)
    + %compress_0         compress    (u8[20], f32[0], f32[0])  int8_compress(%pack_0, None, [4, 8], 512, False)
    + %payload_0          compress    u8[20]                    %compress_0[0]
    + %all_gather_0_int8  collective  u8[40]                    all_gather(%payload_0, 2, world)
    + %payloads_0         wait        u8[40]                    wait(%all_gather_0_int8)
    + %mean_0             decompress  f32[12]                   int8_decompress(%payloads_0, 2, [4, 8], 512, False)

A dense bucket is scaled while packed and then summed: gloo has no mean, and scaling in the pack saves a pass over
memory. On an accelerator the collective takes the mean, because the operator that packs a list does not scale. An
agreement (values reduced before compression) is a separate stage. Values are copied to the host for a compressor on the
CPU, and back. Compressors take and return fp32, so other gradients are cast, and dense values are cast back before they
are sent. Each rank lowers its own part, since shards differ; all ranks have the same collectives.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.graph.edit import buckets, call, collective_of, refresh_value, wait_of
from fxcomp.graph.info import NodeInfo, Role, update_info
from fxcomp.graph.ops import ALL_GATHER, ALL_REDUCE, CAST, D2H, H2D, OF_PARTS, TURN, WAIT
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.legs import Decode, Encode, Send
from fxcomp.plan.lines import BucketLine, LineKind, lines_of, sent
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import DENSE


def lower_strategies(
    gm: GraphModule, plan: Plan, cluster: Cluster, rank: int, *, multiplies_means: bool = False
) -> GraphModule:
    """Lower every bucket. With `multiplies_means`, a factor of all gradients multiplies uncompressed means, not values
    before they are sent, as a GradScaler does with DistributedDataParallel.
    """
    plan.check_fits(cluster)
    for number, pack in list(buckets(gm)):
        lowering = _Lowering(gm, number, plan.buckets[number], pack)
        if multiplies_means and plan.buckets[number].strategy.keeps_values:
            lowering.multiply_mean()
        lowering.lower(cluster, rank)
    return gm


class _Lowering:
    """Writes the nodes of one bucket between the pack and the use of the mean."""

    def __init__(self, gm: GraphModule, number: int, bucket: Bucket, pack: Node) -> None:
        self.graph, self.number, self.bucket, self.pack = gm.graph, number, bucket, pack
        self.dtype = bucket.element_type.dtype
        flat = collective_of(pack)
        assert flat is not None, f"bucket {number} has no collective"
        self.flat, self.done = flat, wait_of(flat)
        self.value = pack
        """Node that the next line takes as input."""
        self.agreed: Node | None = None
        self.proposal: Node | None = None
        self.sizes: Iterator[int] = iter(())
        """Bytes of the remaining collectives, as on rank 0, so that predictions are equal on all ranks."""
        self.stage = 0
        self.names = Counter({self.flat.name: 1, self.done.name: 1})

    def lower(self, cluster: Cluster, rank: int) -> None:
        gradients: Any = self.pack.args[0]
        shapes = [gradient.meta["val"].shape for gradient in gradients]
        kind = self.bucket.element_type
        route = route_of(self.bucket.strategy, shapes, cluster, rank, kind)
        self.pack.args = (self.pack.args[0], float(route.scale))
        if self.bucket.strategy == DENSE:
            if compat.is_accelerator(self.pack.meta["val"].device):
                self.pack.args = (self.pack.args[0], 1.0)
            else:
                self.flat.args = (self.pack, "sum", Level.WORLD.value)
            return
        if route.packs_fp32 and self.dtype is not torch.float32:
            self.pack.update_kwarg("dtype", torch.float32)
            refresh_value(self.pack)
        of_rank_0 = lines_of(route_of(self.bucket.strategy, shapes, cluster, element_type=kind))
        self.sizes = iter([line.size for line in sent(of_rank_0)])
        for stage, lines in enumerate(lines_of(route)):
            with self.graph.inserting_before(self.done if stage else self.flat):
                for line in lines:
                    _NODES[line.kind](self, line)
        self.done.replace_all_uses_with(self.value)
        self.graph.erase_node(self.done)
        self.graph.erase_node(self.flat)

    def multiply_mean(self) -> None:
        """Multiply the mean by the factor of all gradients. Products of sent 16-bit values may need more bits."""
        factor = self.pack.kwargs.get("factor")
        if factor is None:
            return
        self.pack.update_kwarg("applies", False)
        users = list(self.done.users)
        with self.graph.inserting_before(users[0]):
            label = NodeInfo(Role.UNPACK, bucket=self.number)
            product = call(self.graph, torch.ops.aten.mul.Tensor, (self.done, factor), label)
        for user in users:
            user.replace_input_with(self.done, product)

    def packed(self, _: BucketLine) -> None:
        """Do nothing: the pack exists already."""

    def cast(self, _: BucketLine) -> None:
        is_fp32 = self.value.meta["val"].dtype is torch.float32
        self.value = self._node(CAST, (self.value, self.dtype if is_fp32 else torch.float32), Role.COPY, "cast")

    def copy(self, line: BucketLine) -> None:
        target = D2H if line.kind is LineKind.D2H else H2D
        self.value = self._node(target, (self.value,), Role.COPY, line.kind.value)

    def turn(self, line: BucketLine) -> None:
        turned = line.send.turned
        assert turned is not None, "a turn has an order"
        self.value = self._node(TURN, (self.value, turned.outer, list(turned.sizes)), Role.PACK, "turned")

    def propose(self, line: BucketLine) -> None:
        leg, arguments = line.encode, self._values_to_encode(line.encode)
        self.proposal = self._node(leg.compressor.propose_op, arguments, Role.PROPOSE, "proposal", slot=leg.slot)

    def compress(self, line: BucketLine) -> None:
        leg, arguments, keywords = line.encode, self._values_to_encode(line.encode), self._keywords(line.encode)
        made = self._node(leg.compressor.compress_op, arguments, Role.COMPRESS, "compress", slot=leg.slot, **keywords)
        self.value = self._node(operator.getitem, (made, 0), Role.COMPRESS, "payload", slot=leg.slot)

    def _values_to_encode(self, leg: Encode) -> tuple[Any, ...]:
        return self.value, None, [size for piece in leg.segments for size in piece], *leg.compressor.parameters

    def decompress(self, line: BucketLine) -> None:
        leg, keywords = line.decode, self._keywords(line.decode)
        sizes = [size for piece in leg.segments for size in piece]
        arguments = (self.value, leg.payloads, sizes, *leg.compressor.parameters)
        self.value = self._node(
            leg.compressor.decompress_op, arguments, Role.DECOMPRESS, "mean", slot=leg.slot, **keywords
        )
        self.agreed = None

    def _keywords(self, leg: Encode | Decode) -> dict[str, Any]:
        agreed = {} if self.agreed is None else {"agreed": self.agreed}
        return agreed if len(leg.segments) == 1 else {**agreed, "pieces": [len(piece) for piece in leg.segments]}

    def agree(self, line: BucketLine) -> None:
        assert self.proposal is not None, "ranks agree on a proposal"
        self.agreed = self._exchanged(line, self.proposal, "agreed", "_proposal")

    def send(self, line: BucketLine) -> None:
        if line.of is not None:
            self.value = self._exchanged(line, self.value, "payloads", f"_{line.of.compressor.name}")
        else:
            level = line.send.level
            suffix = "" if level is Level.WORLD else f"_{level.value}"
            self.value = self._exchanged(line, self.value, "wait", suffix)

    def _exchanged(self, line: BucketLine, sent: Node, arrived: str, suffix: str) -> Node:
        """Insert a collective and a wait. The wait begins the next stage. A group of one rank needs neither."""
        leg, size = line.send, next(self.sizes)
        if leg.ranks == 1:
            self.stage += 1
            return sent
        target, arguments = _operator_and_arguments(leg, sent)
        collective = self._node(target, arguments, Role.COLLECTIVE, leg.kind.value, suffix)
        update_info(collective, sent_bytes=size)
        self.stage += 1
        with self.graph.inserting_before(self.done):
            return self._node(WAIT, (collective,), Role.WAIT, arrived)

    def _node(
        self, target: Any, args: tuple[Any, ...], role: Role, name: str, suffix: str = "", slot: int = 0, **kwargs: Any
    ) -> Node:
        label = NodeInfo(role, bucket=self.number, stage=self.stage, slot=slot)
        return call(self.graph, target, args, label, name=self._named(f"{name}_{self.number}{suffix}"), kwargs=kwargs)

    def _named(self, name: str) -> str:
        """Append a count to a repeated name, because torch.fx would increase the bucket's number in the name."""
        again = self.names[name]
        self.names[name] += 1
        return f"{name}_{again}" if again else name


def _operator_and_arguments(leg: Send, sent: Node) -> tuple[Any, tuple[Any, ...]]:
    level = leg.level.value
    if leg.kind is CollectiveKind.ALL_REDUCE:
        return ALL_REDUCE, (sent, leg.how, level)
    if leg.kind is CollectiveKind.ALL_GATHER and isinstance(leg.cut, int):
        return ALL_GATHER, (sent, leg.cut, level)
    return OF_PARTS[leg.kind], (sent, list(leg.parts), leg.place, level)


_NODES: dict[LineKind, Callable[[_Lowering, BucketLine], None]] = {
    LineKind.PACK: _Lowering.packed,
    LineKind.CAST: _Lowering.cast,
    LineKind.D2H: _Lowering.copy,
    LineKind.H2D: _Lowering.copy,
    LineKind.TURN: _Lowering.turn,
    LineKind.PROPOSE: _Lowering.propose,
    LineKind.AGREE: _Lowering.agree,
    LineKind.COMPRESS: _Lowering.compress,
    LineKind.SEND: _Lowering.send,
    LineKind.DECOMPRESS: _Lowering.decompress,
}
