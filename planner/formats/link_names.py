"""Links by name, for a cluster whose bandwidth nobody has measured: "nvlink4", "pcie4".

Rates are per GPU and direction: of all NVLinks of a GPU together, and of 16 lanes of PCIe. Sources:

    nvlink2 to nvlink5   NVIDIA data sheets of V100, A100, H100 and B200: 300, 600, 900 and
                         1,800 GB/s both ways
    pcie3 to pcie5       PCI-SIG: 8, 16 and 32 GT/s per lane, 128 bits of 130

What is achieved of them: of NVLink 0.76, the bus bandwidth of an all-reduce of 1 GB on 8 A100
(nccl-tests, 229 of 300 GB/s, in vTrain's repository); of PCIe 0.8, a copy between two GPUs that
reach each other.
"""

import re
from collections.abc import Mapping
from typing import Literal

from planner.errors import UnitError
from planner.units import parse_bandwidth

RateSource = Literal["data sheet", "measured"]

_NVLINK_ACHIEVED = 0.76
_PCIE_ACHIEVED = 0.8

ACHIEVED_BYTES_PER_S: Mapping[str, float] = {
    "nvlink2": 150e9 * _NVLINK_ACHIEVED,
    "nvlink3": 300e9 * _NVLINK_ACHIEVED,
    "nvlink4": 450e9 * _NVLINK_ACHIEVED,
    "nvlink5": 900e9 * _NVLINK_ACHIEVED,
    "pcie3": 15.75e9 * _PCIE_ACHIEVED,
    "pcie4": 31.5e9 * _PCIE_ACHIEVED,
    "pcie5": 63e9 * _PCIE_ACHIEVED,
}


# Inside a server, by the GPU's name in estimates, where nothing else is known. T4, L4 and A10G of
# clouds do not reach each other directly. Nor do GeForce cards, as their driver has it: what they
# send passes the host's memory, at 25.8 GB/s both ways together between RTX 4090 on 16 lanes of
# PCIe 4 (tinygrad/open-gpu-kernel-modules, issue 6; 41.4 where they reach each other). The 3090 has
# the same lanes, and the 5090 twice the rate per lane, of which nobody measured the share.
_INSIDE: Mapping[str, tuple[str, ...]] = {
    "nvlink2": ("v100",),
    "nvlink3": ("a100", "a100-80gb"),
    "nvlink4": ("h100", "h200", "gh200"),
    "nvlink5": ("b200", "gb200", "b300"),
    "pcie3": ("titan-x", "titan-x-pascal", "p100", "v100-pcie"),
    # One link of Infinity Fabric joins two MI300X: 48 of its 64 GB/s are achieved (AMD,
    # "Understanding RCCL Bandwidth and xGMI Performance on AMD Instinct MI300X", 2025), and PCIe 5
    # is as fast. Collectives of eight, which use seven links at once, are priced too slow.
    "12.9GB/s": ("rtx-3090", "rtx-4090"),
    "25.8GB/s": ("rtx-5090",),
    "pcie5": ("rtx-pro-6000", "mi300x", "mi325x", "mi355x"),
    "4GB/s": ("t4", "l4", "a10g"),
}
# To the memory of the host, 16 lanes of PCIe by the data sheets. The two with a Grace CPU have
# NVLink-C2C, 450 GB/s each way, of which the share of other NVLinks is assumed.
_TO_HOST: Mapping[str, tuple[str, ...]] = {
    "pcie3": ("titan-x", "titan-x-pascal", "p100", "v100", "v100-pcie", "t4"),
    "pcie5": (
        *("rtx-5090", "rtx-pro-6000", "h100", "h200", "b200", "b300"),
        *("mi300x", "mi325x", "mi355x"),
    ),
    "nvlink4": ("gh200", "gb200"),
}
BETWEEN_SERVERS = "100Gbps"
# Servers of 8 such GPUs are sold with 400 Gbit/s for each (NVIDIA DGX H100, H200 and B200; P5 and
# P6 of AWS; GB200 NVL72, eight of its GPUs), and with 800 for each (DGX B300).
_FAST_BETWEEN: Mapping[str, tuple[str, ...]] = {
    "3200Gbps": ("h100", "h200", "b200", "gb200", "mi300x", "mi325x", "mi355x"),
    "6400Gbps": ("b300",),
}


def usual_link(device: str) -> str:
    """Return the link that servers of such GPUs have inside; 16 lanes of PCIe 4 for an
    unknown one.
    """
    return next((link for link, devices in _INSIDE.items() if device.lower() in devices), "pcie4")


def usual_host_link(device: str) -> str:
    """Return the link of such a GPU to the memory of its host; 16 lanes of PCIe 4 for an unknown
    one.
    """
    return next((link for link, devices in _TO_HOST.items() if device.lower() in devices), "pcie4")


def usual_between(device: str) -> str:
    """Return the link that a server of such GPUs has to others."""
    fast = (link for link, devices in _FAST_BETWEEN.items() if device.lower() in devices)
    return next(fast, BETWEEN_SERVERS)


# Rates of networks as their data sheets name them, in Gbit/s. One TCP connection or one ring
# reaches 94% of 10 Gbit/s, so slower ones are taken at their word; of faster ones it may reach a
# tenth. 94 tuning runs on servers of four Omni-Path ports found 5 GB/s in one ring, of 50 by the
# data sheet (bigscience, chronicles of BLOOM).
_NETWORK_GBPS = (25, 40, 50, 56, 100, 200, 400, 800, 1600, 3200, 6400)


def rate_source(text: str) -> RateSource | None:
    """Return "data sheet" for a link by name and for a network's nominal rate, such as "100Gbps";
    None for other rates, which somebody knows.
    """
    name = text.strip().lower()
    nominal = re.fullmatch(r"(\d+) ?gbps", name)
    if name in ACHIEVED_BYTES_PER_S or (nominal and int(nominal[1]) in _NETWORK_GBPS):
        return "data sheet"
    return None


def known_rate(text: str) -> str:
    """Return the text of a link or a rate, which keeps its name; raise UnitError for others."""
    link_bandwidth(text)
    return text.strip()


def names_link(rate: float | str) -> bool:
    """Return whether a rate is said by the name of a link, such as "pcie4"."""
    return isinstance(rate, str) and rate.strip()[:1].isalpha()


def link_bandwidth(text: str) -> float:
    """Return the bytes per second that the named link achieves, or of a rate such as "10Gbps"; else
    raise UnitError.
    """
    name = text.strip().lower()
    if not names_link(name):
        return parse_bandwidth(text)
    if name not in ACHIEVED_BYTES_PER_S:
        known = ", ".join(ACHIEVED_BYTES_PER_S)
        raise UnitError(
            f"'{text}' is no link that is known by name", hint=f"write a rate, or {known}"
        )
    return ACHIEVED_BYTES_PER_S[name]
