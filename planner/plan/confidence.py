"""How far estimates were from runs that others measured, by what was estimated.

`judged_errors.json` is made by `python -m benchmarks.gpu_truth.intervals`, which says of each kind
of answer how fast the measured runs were relative to their estimate: between `least` and `most` for
80% of them. A kind is a GPU, how its ranks are joined, how a plan uses them, and the stack of
kernels. Where a kind was not judged, a wider one stands for it: first without what replicas and the
ranks of a layer do, then without the network, then that of all GPUs together. These stand for a GPU
whose kernels nobody measured, too.

Most runs were estimated with the kernels that their program had, which is no stack. Where no runs
of a GPU were estimated with a stack's kernels, its interval holds that of the same kind without a
stack, and that of all runs with any stack. No run of a mixture of experts was judged, nor one whose
sequences are divided: their estimates have no interval.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.names import StackName
from planner.formats.profile import Device, Profile, has_experts

Links = Literal["known", "data sheet"]
Network = Literal["one server", "fast", "slow"]
FAST_BYTES_PER_S = 25e9  # of a server: two ports of 100 Gbit/s
_SERVER_BYTES_PER_S = 3e9  # PCIe through the host's memory reaches more, and most networks less
_OF_KINDS = ("gpu", "links", "network", "divided", "replicated", "stack")
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
    """What was estimated. None stands for any.

    Attributes:
        gpu: name of the device; "" for all of them.
        links: whether somebody knows the links.
        network: what joins the ranks; see `network_of`.
        divided: whether ranks divide layers.
        replicated: whether stages have replicas.
        stack: whose kernels were estimated; None for those of the program that ran, here not for
            any.
    """

    gpu: str
    links: Links | None
    network: Network | None = None
    divided: bool | None = None
    replicated: bool | None = None
    stack: StackName | None = None

    def wider(self) -> Iterator["Kind"]:
        """Yield this kind, and those that it is part of, the narrowest first."""
        if self.gpu:
            yield from self.of_this_gpu()
        yield Kind("", None, stack=self.stack)

    def of_this_gpu(self) -> Iterator["Kind"]:
        """Yield this kind, and the wider ones of its GPU."""
        yield self
        yield replace(self, replicated=None)
        yield replace(self, replicated=None, divided=None)
        yield replace(self, replicated=None, divided=None, network=None)
        yield Kind(self.gpu, None, stack=self.stack)


ALL = Kind("", None)


def network_of(cluster: Cluster) -> Network:
    """Return what joins the ranks: one server, or servers with fast or slow links between them."""
    inside, *outside = cluster.levels
    between = [level.bandwidth_bytes_per_s for level in outside if level.size > 1]
    if not between:
        is_server = inside.size == 1 or inside.bandwidth_bytes_per_s >= _SERVER_BYTES_PER_S
        return "one server" if is_server else "slow"
    return "fast" if min(between) >= FAST_BYTES_PER_S else "slow"


def interval_of(
    profile: Profile, cluster: Cluster, *, divided: bool, replicated: bool
) -> Interval | None:
    """Return the interval of an estimated answer, the widest of its kinds of GPUs; None for a
    profile that was measured, and for a mixture of experts.

    Args:
        divided: whether ranks of the plan divide layers.
        replicated: whether its stages have replicas.
    """
    if profile.provenance.source != "estimated" or profile.device.kind == "cpu":
        return None
    if any(has_experts(layer.op) for layer in profile.layers):
        return None
    links: Links = "known" if cluster.level_by_data_sheet is None else "data sheet"
    devices = [times.device for times in profile.kinds or ()] or [profile.device]
    # Of the eager stack, each operation is a kernel, as in the programs that say nothing else.
    stack = None if profile.stack == "eager" else profile.stack
    network = network_of(cluster)
    intervals = [
        interval_of_kind(Kind(_judged_as(each), links, network, divided, replicated, stack))
        for each in devices
    ]
    return _around(intervals)


def _around(intervals: Sequence[Interval]) -> Interval:
    """Return the least interval that holds all of these."""
    return Interval(min(each.least for each in intervals), max(each.most for each in intervals))


def _judged_as(device: Device) -> str:
    """Return the GPU whose runs stand for a device's: all, where its kernels were not measured."""
    return "" if device.shares_of is not None else device.name


def interval_of_kind(kind: Kind) -> Interval:
    """Return the interval of a kind, or of the narrowest kind around it that was judged."""
    judged = judged_intervals()
    if kind.stack is None:
        return next(judged[each] for each in kind.wider() if each in judged)

    own = kind.of_this_gpu() if kind.gpu else ()
    found = next((judged[each] for each in own if each in judged), None)
    if found is not None:
        return found
    of_stacks = [judged[each] for each in judged if not each.gpu and each.stack is not None]
    return _around([interval_of_kind(replace(kind, stack=None)), *of_stacks])


@cache
def judged_intervals() -> dict[Kind, Interval]:
    """Return the table of intervals, which is read once."""
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    return {
        Kind(**{name: row[name] for name in _OF_KINDS}): Interval(row["least"], row["most"])
        for row in table["kinds"]
    }
