"""What Aceso's runs send between stages, and how long their links take for it.

Its profiler measured the links of the servers that its runs had: messages between two GPUs of a
server and of two servers (`profiler/p2p_band_profiler.py`), and all-reduces of two, four and eight
GPUs (`profiler/comm_profiler.py`). Mist measured what a whole server reaches. `aceso_links.json`
has all of these.

The A10G's are left out, because they contradict each other and the runs: all-reduces of four ranks
reached 1.9 GB/s in one session and 4.4 in another, and what the runs' stages log beside their
degrees is 1.5 GB/s in one run and 3.8 in another. These have the 4 GB/s that the README of the
anchors says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu_truth.rows import PCIE

PER_SERVER = 8
_MIB, _GIB = 2**20, 2**30
# the median of all-reduces that differ less in size is a rate: some took three times as long as
# others
_SIMILAR = 2.0


@dataclass(frozen=True)
class Rates:
    """What the links of one kind of server reach; see the module."""

    measured: Mapping[str, Any] | None  # None where all is at the rate of PCIe
    sizes: Sequence[float]

    @classmethod
    @cache
    def of(cls, gpu: str) -> Rates:
        """Return those of servers with such GPUs."""
        content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
        return cls(content["gpus"].get(gpu), tuple(content["message_mib"]))

    def message_bytes_per_s(self, size_bytes: float, *, inside: bool) -> float:
        """Return the rate of one message of this size, inside a server or between two."""
        if self.measured is None:
            return PCIE
        rates = self.measured["inside_gib_per_s" if inside else "between_gib_per_s"]
        return _GIB * float(np.interp(np.log2(size_bytes / _MIB), np.log2(self.sizes), rates))

    @property
    def server_bytes_per_s(self) -> float:
        """Rate of a server's link to others."""
        return PCIE if self.measured is None else float(self.measured["server_gb_per_s"]) * 1e9

    def reduce_bytes_per_s(self, ranks: int, size_bytes: float) -> float:
        """Return the rate of each rank's link in all-reduces of about this size."""
        if self.measured is None:
            return PCIE
        ranks = min(ranks, PER_SERVER)
        rates = [
            2 * (ranks - 1) / ranks * size * _MIB / (milliseconds / 1e3)
            for size, milliseconds in self.measured["all_reduce_ms"][str(ranks)]
            if 1 / _SIMILAR <= size * _MIB / size_bytes <= _SIMILAR
        ]
        return float(median(rates))

    def message_s(
        self, whole_bytes: float, divided_bytes: float, ranks: tuple[int, int], *, inside: bool
    ) -> float:
        """Return the seconds of what one stage sends to the next.

        Each rank sends its part of all tensors (`scatter_gather_tensors_in_pipeline`, which is on
        by default), and those that receive gather what is whole on every rank.

        Args:
            whole_bytes, divided_bytes: of tensors that are whole on every rank, and of those that
            the ranks divide. ranks: how many send, and how many receive. inside: whether both
            stages are in one server.
        """
        flows, total = min(ranks), whole_bytes + divided_bytes
        rate = flows * self.message_bytes_per_s(total / flows, inside=inside)
        if not inside and self.measured is not None:
            rate = min(rate, self.server_bytes_per_s)
        receivers = ranks[1]
        if receivers == 1 or not whole_bytes:
            return total / rate
        gathered_s = (
            (receivers - 1)
            / receivers
            * whole_bytes
            / self.reduce_bytes_per_s(receivers, whole_bytes)
        )
        return total / rate + gathered_s
