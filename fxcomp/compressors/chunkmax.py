"""Send the value of largest magnitude of each chunk, with its place in the chunk.

    chunk   = ceil(1 / ratio) values; the last of a segment may be shorter
    m       = ceil(n / chunk)
    decoded = v at the place of largest |v| in each chunk, 0 elsewhere

Payload, as bytes: for each segment its m fp32 values, then m places within their chunks, one byte each for chunks of up
to 256 values and two beyond, filled up to a multiple of four. 5m bytes, or 6m.

Of equal magnitudes the lower place goes. Magnitudes are compared as unsigned bit patterns, so whatever is not finite
counts as largest: the first such value of a chunk is sent (a NaN before an infinity). The residual is 0 where a value
was sent, v elsewhere, and stays as it was where v is not finite.

It needs one pass and no threshold, where top-k needs to know all values. What is left out is at most 1 - 1/chunk of the
squared norm: at 1 % it is 0.92 for Gaussian values, 0.86 for Laplace and 0.12 for a log-normal mixture of scales, where
top-k has 0.92, 0.84 and 0.05. Where the energy of a parameter is concentrated in few rows, top-k is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxcomp.compressors import kernels
from fxcomp.compressors.base import Compressed, Compressor, bad_payload, empty_like_none, mean_over_ranks
from fxcomp.compressors.blocks import count_blocks, split, to_blocks
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter
from fxcomp.compressors.registration import register
from fxcomp.compressors.topk import as_fraction

_PLACES = 1 << 16  # in the longest chunk


def _compress(bucket: Tensor, residual: Tensor | None, segments: Sequence[int], chunk: int) -> tuple[Tensor, Tensor]:
    value = bucket if residual is None else bucket + residual
    sections = [bucket.new_empty(0, dtype=torch.uint8)]
    left_out = [bucket.new_empty(0)]
    for piece in split(value, segments):
        rows = to_blocks(piece, (len(piece),), chunk)
        places = _largest(rows)
        values = rows.gather(1, places)
        width = torch.uint8 if chunk <= 256 else torch.int16
        sections += [values.flatten().view(torch.uint8), _fill_up(places.flatten().to(width).view(torch.uint8))]
        left_out.append(rows.scatter(1, places, 0.0).flatten()[: len(piece)])
    if residual is None:
        return torch.cat(sections), bucket.new_empty(0)
    return torch.cat(sections), torch.where(value.isfinite(), torch.cat(left_out), residual)


def _largest(rows: Tensor) -> Tensor:
    """The place of the largest magnitude of each row, as a column. Zeros that fill up a row come last, so never."""
    magnitude = (rows.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    order = magnitude * _PLACES - torch.arange(rows.shape[1], device=rows.device)  # no two of a row are equal
    return order.argmax(dim=1, keepdim=True) if rows.numel() else magnitude[:, :1]


def _decompress(payloads: Tensor, ranks: int, segments: Sequence[int], chunk: int) -> Tensor:
    return mean_over_ranks([_decompress_one(payload, segments, chunk) for payload in payloads.view(ranks, -1)])


def _decompress_one(payload: Tensor, segments: Sequence[int], chunk: int) -> Tensor:
    out = [torch.empty(0, dtype=torch.float32, device=payload.device)]
    for n, section in zip(segments, split(payload, [_bytes_of(n, chunk) for n in segments]), strict=True):
        m = count_blocks((n,), chunk)
        values = section[: 4 * m].clone().view(torch.float32).view(m, 1)
        if chunk <= 256:
            places = section[4 * m : 5 * m].long()
        else:
            places = section[4 * m : 6 * m].clone().view(torch.int16).long() & 0xFFFF
        # Adding to zero, as the mean over ranks does, makes a sent -0 a 0.
        out.append(values.new_zeros(m, chunk).scatter_add_(1, places.view(m, 1), values).flatten()[:n])
    return torch.cat(out)


def _bytes_of(n: int, chunk: int) -> int:
    m = count_blocks((n,), chunk)
    return 4 * m + -(-m * (1 if chunk <= 256 else 2) // 4) * 4


def _fill_up(section: Tensor) -> Tensor:
    return pad(section, (0, -len(section) % 4))


@register
@dataclass(frozen=True, slots=True)
class ChunkMax(Compressor):
    """Nearly top-k, at the speed of memory; only with error feedback."""

    ratio: float

    facts: ClassVar[Facts] = Facts(
        name="chunkmax",
        summary="the value of largest magnitude of each chunk",
        payload="5m where 1/ratio ≤ 256, 6m beyond, filled up to four; m = ⌈n/⌈1/ratio⌉⌉",
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        sends_values=True,
        parameters=(Parameter("ratio", "share of values sent", 1 / _PLACES, 0.5),),
        use="Slow links and few ranks: about half of top-k's time, and its quality where energy is spread.",
        avoid="Where a few places of a parameter hold most of the energy: embeddings, and the kernels of convolutions.",
        source="local selection of ScaleCom, Chen et al. 2020",
    )

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(_bytes_of(n, self.chunk) for n in segments)

    @property
    def chunk(self) -> int:
        """Values of which one is sent, in exact arithmetic."""
        part, whole = as_fraction(self.ratio)
        return -(-whole // part)

    def compress_reference(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> Compressed:
        payload, left_out = _compress(bucket, residual, segments, self.chunk)
        return Compressed(payload, left_out, empty_like_none(bucket, state))

    def decompress_reference(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> Tensor:
        return _decompress(payloads, ranks, segments, self.chunk)

    def encode_on_cpu(
        self,
        bucket: Tensor,
        residual: Tensor | None,
        payload: Tensor,
        segments: Sequence[int],
        state: Tensor | None,
        agreed: Tensor | None,
    ) -> bool:
        kernels.run("fxcomp_chunkmax_encode", bucket, residual, payload, tuple(segments), len(segments), self.chunk)
        return True

    def decode_on_cpu(
        self,
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        out: Tensor,
        agreed: Tensor | None,
        state: Tensor | None,
    ) -> bool:
        is_ours = kernels.run(
            "fxcomp_chunkmax_decode", payloads, ranks, tuple(segments), len(segments), self.chunk, out
        )
        if not is_ours:
            raise bad_payload("places outside their chunks", ranks, segments)
        return True
