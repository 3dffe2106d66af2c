"""Presets of absent devices, from data sheets, and cost tables for them.

Peaks are for dense matrices; data sheets print twice as much for sparse ones. Fractions of peaks and launch times are
assumed, so reports label a preset's prices as estimates.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxcomp import compat
from fxcomp.compressors import Compressor
from fxcomp.compressors.powersgd import near_square
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import ATTENTION, CUDNN_ATTENTION
from fxcomp.plan.strategy import Device

PRODUCT_SHARE = 0.7
"""Fraction of peak that matrix products reach (assumed: vendor libraries reach 0.6 to 0.9 on large matrices)."""

MEMORY_SHARE = 0.85
"""Fraction of peak memory bandwidth that operators reach (assumed: 0.8 to 0.93 is usual)."""

FLASH_SHARE, FLASH_SHARE_ON_HOPPER, CUDNN_SHARE = 0.7, 0.34, 0.5
"""Fractions of 16-bit peak that fused attention reaches. Flash attention: 230 of 312 TFLOP/s on an A100, 335 of 989 on
an H100, whose new instructions torch's kernel does not use (Dao, "FlashAttention-2", 2023, sections 4.1 and 5).
cuDNN: 373 to 574 of 989 at 1,024 positions, by head size (Shah and others, "FlashAttention-3", 2024, figure 5).
"""

LAUNCH_US = 5.0
"""Minimum time of one operator: torch's dispatch and kernel launch (assumed)."""

COPY_SHARE = 0.8
"""Fraction of PCIe bandwidth that copies from pinned memory reach (assumed)."""

ERROR = 0.75
"""Relative error of compute priced by a preset. Example jobs, priced by their CPU's peaks, were predicted 11 to 75 %
below the measured step (2026-11). A GPU is assumed to be no worse.
"""

ERROR_OF_TOLD_STEP = 0.15
"""Relative error if the user gives the step's time and only its distribution over operators is estimated (assumed)."""


@dataclass(frozen=True, slots=True)
class Preset:
    name: str
    title: str
    tflops: Mapping[str, float]
    """Peak TFLOP/s of dense products by element type: f32 without tensor cores, tf32, bf16, f16, f8, f64."""
    gb_per_s: float
    host_gb_per_s: float
    """Peak bandwidth between host and device, one way."""
    capability: tuple[int, int]
    memory_gb: float
    multiprocessors: int
    source: str

    @property
    def facts(self) -> compat.DeviceFacts:
        """Device properties, as torch.cuda reports them."""
        return compat.DeviceFacts(self.title, self.capability, int(1e9 * self.memory_gb), self.multiprocessors)

    @property
    def description(self) -> str:
        shares = f"{PRODUCT_SHARE:.0%} in products and {MEMORY_SHARE:.0%} of the bandwidth"
        return f"{self.source}; of its peaks {shares} assumed"

    @property
    def roofline(self) -> Roofline:
        reached = {name: 1e3 * PRODUCT_SHARE * peak for name, peak in self.tflops.items()}
        flash = FLASH_SHARE_ON_HOPPER if self.capability >= (9, 0) else FLASH_SHARE
        for kernel, share in ((ATTENTION, flash), (CUDNN_ATTENTION, CUDNN_SHARE)):
            reached |= {f"{n} {kernel}": 1e3 * share * self.tflops[n] for n in ("bf16", "f16") if n in self.tflops}
        return Roofline(
            gflops=reached["f32"],
            gb_per_s=MEMORY_SHARE * self.gb_per_s,
            launch_us=LAUNCH_US,
            source=f"estimate: {self.description}",
            others={name: gflops for name, gflops in reached.items() if name != "f32"},
        )

    def costs(self, compressors: Sequence[Compressor]) -> CostTable:
        """Return the device's cost table. The host is unknown, so no compression is offloaded to it."""
        roofline = self.roofline
        return CostTable(
            hardware=self.title,
            source="estimate",
            roofline=roofline,
            compressors={f"{c}@{Device.GPU.value}": compressor_cost(c, roofline) for c in dict.fromkeys(compressors)},
            pack_gb_per_s=roofline.gb_per_s / 2,  # packing also reads each byte
            copy_gb_per_s=COPY_SHARE * self.host_gb_per_s,
            compute_error=ERROR,
            estimate=self.description,
        )


def compressor_cost(compressor: Compressor, roofline: Roofline) -> CompressorCost:
    return CompressorCost.of(*(_point(compressor, roofline, elements) for elements in _SIZES))


_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 26)


def _point(compressor: Compressor, roofline: Roofline, elements: int) -> CompressorPoint:
    """Price a compressor at one size, by the bytes that it moves through memory.

    Each encoding pass (`facts.passes`) reads the gradient and, with error feedback, the residual. Then residual and
    payload are written. Decoding reads all payloads and writes their mean. Each pass is a launch.
    """
    facts = compressor.facts
    bound = compressor.bound_to([near_square(elements)], 2)
    carried = 4 * elements if compressor.needs_error_feedback else 0
    payload = bound.payload_bytes((elements,))
    read = facts.passes * (4 * elements + carried)
    encode = facts.passes * roofline.launch_us + _us(roofline, read + carried + payload)
    decode = roofline.launch_us + _us(roofline, payload + 4 * elements)
    propose = roofline.launch_us + _us(roofline, 4 * elements + carried) if facts.agreement is not None else 0.0
    return CompressorPoint(elements, encode, decode, propose, decode_more_us=_us(roofline, payload))


def _us(roofline: Roofline, size: float) -> float:
    return size / (roofline.gb_per_s * 1e3)


_PRESETS = (
    # "NVIDIA A100 Tensor Core GPU" data sheet, 2022: SXM, 80 GB HBM2e, PCIe 4.
    Preset("a100", "NVIDIA A100 SXM 80 GB", {"f32": 19.5, "tf32": 156.0, "bf16": 312.0, "f16": 312.0, "f64": 9.7},
           2039.0, 32.0, (8, 0), 80.0, 108, "NVIDIA's A100 data sheet"),
    # 40 GB HBM2.
    Preset("a100-40gb", "NVIDIA A100 SXM 40 GB", {"f32": 19.5, "tf32": 156.0, "bf16": 312.0, "f16": 312.0, "f64": 9.7},
           1555.0, 32.0, (8, 0), 40.0, 108, "NVIDIA's A100 data sheet"),
    # "NVIDIA H100 Tensor Core GPU" data sheet, 2023: SXM5, sparse peaks halved, PCIe 5.
    Preset("h100", "NVIDIA H100 SXM",
           {"f32": 67.0, "tf32": 494.5, "bf16": 989.5, "f16": 989.5, "f8": 1979.0, "f64": 34.0},
           3350.0, 64.0, (9, 0), 80.0, 132, "NVIDIA's H100 data sheet"),
    # "NVIDIA H200 Tensor Core GPU" data sheet, 2023: the H100's processor, 141 GB HBM3e, sparse peaks halved.
    Preset("h200", "NVIDIA H200 SXM",
           {"f32": 67.0, "tf32": 494.5, "bf16": 989.5, "f16": 989.5, "f8": 1979.0, "f64": 34.0},
           4800.0, 64.0, (9, 0), 141.0, 132, "NVIDIA's H200 data sheet"),
    # "NVIDIA L40S" data sheet, 2023: 48 GB GDDR6, PCIe 4.
    Preset("l40s", "NVIDIA L40S", {"f32": 91.6, "tf32": 183.0, "bf16": 362.05, "f16": 362.05, "f8": 733.0, "f64": 1.4},
           864.0, 32.0, (8, 9), 48.0, 142, "NVIDIA's L40S data sheet"),
    # "NVIDIA L4" data sheet, 2023: 24 GB GDDR6, PCIe 4, sparse peaks halved.
    Preset("l4", "NVIDIA L4", {"f32": 30.3, "tf32": 60.0, "bf16": 121.0, "f16": 121.0, "f8": 242.5, "f64": 0.5},
           300.0, 32.0, (8, 9), 24.0, 58, "NVIDIA's L4 data sheet"),
    # "NVIDIA A10" data sheet, 2021: 24 GB GDDR6, PCIe 4.
    Preset("a10", "NVIDIA A10", {"f32": 31.2, "tf32": 62.5, "bf16": 125.0, "f16": 125.0, "f64": 1.0},
           600.0, 32.0, (8, 6), 24.0, 72, "NVIDIA's A10 data sheet"),
    # "NVIDIA V100" data sheet, 2020: SXM2, tensor cores without TF32 and bfloat16, PCIe 3.
    Preset("v100", "NVIDIA V100 SXM2", {"f32": 15.7, "f16": 125.0, "f64": 7.8},
           900.0, 16.0, (7, 0), 32.0, 80, "NVIDIA's V100 data sheet"),
)  # fmt: skip

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}


def preset_named(name: str) -> Preset:
    found = PRESETS.get(name.lower())
    if found is not None:
        return found
    close = difflib.get_close_matches(name.lower(), list(PRESETS), n=1, cutoff=0.0)
    raise BadOption(
        f"there is no device {name!r}; did you mean {close[0]!r}? The devices are {', '.join(PRESETS)}.\n"
        "  For another device, pass the time of its step without communication as --step-ms."
    )
