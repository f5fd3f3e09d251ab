"""How far estimates were from runs that others measured, by what was estimated.

`judged_errors.json` is made by `python -m benchmarks.gpu_truth.intervals`, which says of each kind
of answer how fast the measured runs were relative to their estimate: between `least` and `most` for
80% of them. A kind is a GPU, whether ranks divide layers, and whether the links between servers
were measured. Where a kind was not judged, the nearest one that was stands for it, and where
nothing is near, all do.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from planner.formats.cluster import Cluster
from planner.formats.profile import Device, Profile

Links = Literal["known", "data sheet"]
_TABLE = Path(__file__).with_name("judged_errors.json")


@dataclass(frozen=True)
class Interval:
    """Speeds relative to the predicted one: those of 80% of the measured runs of a kind."""

    least: float
    most: float

    def equal_speed(self, overlap: float) -> float:
        """Return the least share of a plan's predicted speed at which another plan's interval
        covers so much of the plan's.
        """
        covered = self.least + overlap * (self.most - self.least)
        return min(1.0, covered / self.most)


@dataclass(frozen=True)
class Kind:
    """What was estimated.

    Attributes:
        gpu: name of the device; "" for all of them.
        divided: whether ranks divide layers.
        links: whether somebody knows the links.
    """

    gpu: str
    divided: bool
    links: Links


def interval_of(profile: Profile, cluster: Cluster, *, divided: bool) -> Interval | None:
    """Return the interval of an estimated answer, the widest of its kinds of GPUs; None for a
    profile that was measured.
    """
    if profile.provenance.source != "estimated" or profile.device.kind == "cpu":
        return None
    links: Links = "known" if cluster.level_by_data_sheet is None else "data sheet"
    devices = [times.device for times in profile.kinds or ()] or [profile.device]
    intervals = [interval_of_kind(each, divided=divided, links=links) for each in devices]
    return Interval(min(each.least for each in intervals), max(each.most for each in intervals))


def interval_of_kind(device: Device, *, divided: bool, links: Links) -> Interval:
    """Return the interval of the nearest kind that was judged.

    Another degree of division is nearer than other links, and these are nearer than another GPU. A
    GPU whose kernels were not measured has the interval of all GPUs together.
    """
    gpu = "" if device.shares_of is not None else device.name
    judged = _judged()
    for kind in (
        Kind(gpu, divided, links),
        Kind(gpu, not divided, links),
        Kind(gpu, divided, "data sheet" if links == "known" else "known"),
        Kind("", divided, links),
        Kind("", not divided, links),
    ):
        if kind in judged:
            return judged[kind]
    return Interval(
        min(each.least for each in judged.values()), max(each.most for each in judged.values())
    )


@cache
def _judged() -> dict[Kind, Interval]:
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    return {
        Kind(row["gpu"], row["divided"], row["links"]): Interval(row["least"], row["most"])
        for row in table["kinds"]
    }
