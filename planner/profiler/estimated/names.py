"""Find a device of the table by the name that a profile gives it: the table's own, or the driver's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner.profiler.estimated.devices import DEVICES, DeviceSpec

# As torch.cuda reports them, without the maker. Boards of other power or fewer units (H100 PCIe, RTX 3090 Ti) have
# other peaks, so each name fits whole.
_REPORTED: Mapping[str, str] = {
    "titan-x": r"GeForce GTX TITAN X",
    "titan-x-pascal": r"TITAN X \(Pascal\)",
    "p100": r"Tesla P100-SXM2-16GB",
    "v100": r"Tesla V100-SXM[23]-(16|32)GB(-LS)?",
    "v100-pcie": r"Tesla V100-PCIE-(16|32)GB",
    "t4": r"(Tesla )?T4",
    "a100": r"A100-(SXM4|PCIE)-40GB",
    "a100-80gb": r"A100-SXM4-80GB|A100 80GB PCIe",
    "a10": r"A10",
    "a10g": r"A10G",
    "a40": r"A40",
    "a6000": r"RTX A6000",
    "l4": r"L4",
    "l40s": r"L40S",
    "rtx-3090": r"GeForce RTX 3090",
    "rtx-4090": r"GeForce RTX 4090",
    "rtx-5090": r"GeForce RTX 5090",
    "h100": r"H100 80GB HBM3",
    "h200": r"H200",
    "gh200": r"GH200 (96|120|480)GB",
    "b200": r"B200",
    "mi300x": r"(AMD )?Instinct MI300X.*",
}


def find_device(name: str) -> DeviceSpec | None:
    """Return the device of that name; None for one that the table does not have."""
    plain = name.removeprefix("NVIDIA ")
    return next(
        (
            spec
            for key, spec in DEVICES.items()
            if name == spec.name or (key in _REPORTED and re.fullmatch(_REPORTED[key], plain))
        ),
        None,
    )
