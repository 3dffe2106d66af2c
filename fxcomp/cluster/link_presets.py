"""List links that are sold under a name: text for `Link.parse`, with the source of every number.

Bandwidths are what the maker promises for one direction; what a program gets is less. Latencies of NVLink, PCIe and
InfiniBand are a ring step's in NCCL (hwLat of its tuning.cc, Ring and Simple); over Ethernet TCP is assumed.
"""

from __future__ import annotations

from typing import NamedTuple


class LinkPreset(NamedTuple):
    link: str
    source: str


LINK_PRESETS: dict[str, LinkPreset] = {
    "nvlink3": LinkPreset("300GB/s@3.4us", "NVIDIA A100: 600 GB/s, both directions together"),
    "nvlink4": LinkPreset("450GB/s@3.4us", "NVIDIA H100 and H200: 900 GB/s, both directions together"),
    "nvlink5": LinkPreset("900GB/s@3.4us", "NVIDIA B200: 1.8 TB/s, both directions together"),
    "pcie3": LinkPreset("15.75GB/s@5.7us", "PCI Express 3.0 x16: 16 lanes of 8 GT/s in 128b/130b"),
    "pcie4": LinkPreset("31.51GB/s@5.7us", "PCI Express 4.0 x16: 16 lanes of 16 GT/s in 128b/130b"),
    "pcie5": LinkPreset("63.02GB/s@5.7us", "PCI Express 5.0 x16: 16 lanes of 32 GT/s in 128b/130b"),
    "ethernet1": LinkPreset("1gbit@25us", "IEEE 802.3ab; latency assumed: TCP"),
    "ethernet10": LinkPreset("10gbit@25us", "IEEE 802.3ae; latency assumed: TCP"),
    "ethernet25": LinkPreset("25gbit@25us", "IEEE 802.3by; latency assumed: TCP"),
    "ethernet100": LinkPreset("100gbit@25us", "IEEE 802.3ba; latency assumed: TCP"),
    "infiniband-edr": LinkPreset("100gbit@9.6us", "InfiniBand EDR 4x: 4 lanes of 25 Gbit/s"),
    "infiniband-hdr": LinkPreset("200gbit@9.6us", "InfiniBand HDR 4x: 4 lanes of 50 Gbit/s"),
    "infiniband-ndr": LinkPreset("400gbit@9.6us", "InfiniBand NDR 4x: 4 lanes of 100 Gbit/s"),
    "wan": LinkPreset("1gbit@20ms", "assumed: sites of one continent"),
}
