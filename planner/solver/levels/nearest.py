"""A flat cluster that is never worse than one of several levels, so no plan on the levels beats its best plan.

All ranks are as near as the nearest ones, except that the all-reduce of a stage with more replicas than a group has
members must cross the group's link. What a stage costs then depends only on its layers and replicas, and the searches
for flat clusters apply.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.network.placement import Resource
from planner.cost.network.topology import Topology
from planner.cost.rounding import SLACK
from planner.cost.work import IMPOSSIBLE, Floats, Integers, Work
from planner.formats.cost_model_names import CostModelName
from planner.solver.bounds.bounds import Bounds
from planner.solver.bounds.registry import bounds_for


class NearestModel(Bounds):
    """A cost model whose stages span as few groups as their replicas need, next to the stages they talk to."""

    def __init__(self, name: CostModelName, topology: Topology) -> None:
        near = topology.link(0)
        super().__init__(near)
        self.name, self.prices_shards = name, name == "resource"
        self._groups = [*(int(size) for size in topology.groups[:-1]), IMPOSSIBLE]  # the last group holds all ranks
        # The published models know one bandwidth, which here is that of the all-reduce: cuts are priced by `_near`.
        links = [
            replace(near, all_reduce_bandwidth_bytes_per_s=float(ring)) if name == "resource" else topology.link(level)
            for level, ring in enumerate(topology.ring_bytes_per_s)
        ]
        self._levels = [bounds_for(name, link) for link in links]
        self._near = self._levels[0]

    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        r = np.asarray(replicas)
        busy = self._near.resources_s(work, r)
        for smaller, model in zip(self._groups, self._levels[1:], strict=False):
            farther = model.resources_s(work, r)
            for resource in busy:
                if self.name == "resource" or resource == "compute":
                    busy[resource] = np.where(r > smaller, farther[resource], busy[resource])
        return busy

    def fewest_replicas(self, work: Work, target_s: float, at_least: ArrayLike = 1, after: ArrayLike = 0) -> Integers:
        """Return the fewest that stay within a group and meet the target with its links, otherwise a larger group."""
        shape = np.broadcast_shapes(work.compute_s.shape, np.shape(at_least), np.shape(after))
        floor, behind = np.broadcast_to(at_least, shape), np.broadcast_to(after, shape)
        least = np.broadcast_to(self.least_s(work), shape) / target_s * (1 - SLACK)
        # Innermost level first: a stage that meets the target within a group need not cross its link.
        answer = np.full(shape, IMPOSSIBLE, dtype=np.int64)
        smaller = 0
        for larger, model in zip(self._groups, self._levels, strict=True):
            open_ = (answer >= IMPOSSIBLE) & (least <= larger)
            if open_.any():
                part = work if open_.ndim == 1 and open_.all() else work_of(work, open_)
                from_ = np.maximum(floor[open_], smaller + 1)
                if self.name != "resource":  # cuts use the nearest links
                    from_ = np.maximum(from_, self._near.fewest_replicas(part, target_s, from_, behind[open_]))
                    part = _without_cuts(part)
                r = np.maximum(model.fewest_replicas(part, target_s, from_, behind[open_]), from_)
                answer[open_] = np.where(r <= larger, r, IMPOSSIBLE)
            smaller = larger
        return answer

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        return self._near._lower_bounds(work, target_s)

    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        level = sum(replicas > size for size in self._groups[:-1])
        return self._levels[level].additive_s(work, replicas)

    def cut_within(self, output_bytes: Floats, replicas: int, target_s: float) -> NDArray[np.bool_]:
        return self._near.cut_within(output_bytes, replicas, target_s)

    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        return self._near.fewest_around_cut(output_bytes, gradient_bytes, target_s)


def work_of(work: Work, some: NDArray[np.bool_]) -> Work:
    """Return the work of some of the stages, in one row."""
    values = {field.name: np.asarray(getattr(work, field.name)) for field in fields(work)}
    return Work(
        **{name: np.broadcast_to(value, some.shape)[some] if value.ndim else value for name, value in values.items()}
    )


def _without_cuts(work: Work) -> Work:
    nothing = np.zeros_like(work.cut_before_bytes)
    return replace(work.without_transfers(), cut_before_bytes=nothing, cut_after_bytes=nothing)
