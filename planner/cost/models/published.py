"""The published cost models, to compare against: PipeDream's paper and its optimizer. Both charge stages for cuts."""

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.models.cost_model import PlanTime, StageModel, UnpricedPlan
from planner.cost.network.topology import Busy, Placement, Ranks, Topology
from planner.cost.work import Floats, Work
from planner.errors import InputError


class PublishedModel(StageModel):
    """A published cost model, whose devices have links of their own.

    On clusters of several levels, a cut is priced for each of its two stages, from the stage's farthest rank to the
    nearest one across the cut.
    """

    def time(self, plan: UnpricedPlan) -> PlanTime:
        if any(stage.options.sharded for stage in plan.stages):
            raise InputError(
                f"the cost model '{plan.setting.cost_model}' was published before optimizers were sharded",
                hint="use `cost_model=resource`, or shard nothing",
            )
        return super().time(plan)

    def placed_s(self, placement: Placement) -> list[Busy]:
        topology, ranks, found = placement.topology, placement.ranks, list[Busy]()
        for stage, own in enumerate(ranks):

            def between(one: int, other: int, stage: int = stage) -> Busy:
                model = type(self)(topology.link(int(topology.level(one, other))))
                return model.resources_s(placement.works[stage], len(placement.ranks[stage]))

            within = between(min(own), max(own))
            busy: Busy = {"compute": within["compute"]}
            if stage > 0:
                busy["cut_before"] = between(*_farthest(topology, own, ranks[stage - 1]))["cut_before"]
            if stage < len(ranks) - 1 and "cut_after" in within:
                busy["cut_after"] = between(*_farthest(topology, own, ranks[stage + 1]))["cut_after"]
            found.append(busy)
        return found


def _farthest(topology: Topology, own: Ranks, others: Ranks) -> tuple[int, int]:
    if isinstance(own, range) and isinstance(others, range):  # the ends say it all
        return (own[-1], others[-1]) if others[0] < own[0] else (own[0], others[0])
    levels = topology.level(np.asarray(own)[:, None], np.asarray(others)[None, :])
    one = int(levels.min(axis=1).argmax())
    return own[one], others[int(levels[one].argmin())]


class PaperModel(PublishedModel):
    """The equation of the SOSP 2019 paper (section 3.1): stage max(C, 2(r-1)·W/B) / r, boundary 2·a / B."""

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        r = np.asarray(replicas, dtype=np.float64)
        bandwidth = self.link.bandwidth_bytes_per_s
        return {
            "compute": np.maximum(work.compute_s, 2 * (r - 1) * work.trainable_bytes / bandwidth) / r,
            "cut_before": 2 * work.cut_before_bytes / bandwidth + 0 * r,
        }


class PipedreamModel(PublishedModel):
    """PipeDream's published optimizer (optimizer_graph_hierarchical.py, one level).

    stage     (C + 4(r-1)·W / (B·r)) / r
    boundary  2·a / (B·r), with the r of the stage after the cut; also of the stage before it, unless that is the
              first, for which the optimizer leaves it out
    """

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        r = np.asarray(replicas, dtype=np.float64)
        bandwidth = self.link.bandwidth_bytes_per_s
        return {
            "compute": (work.compute_s + 4 * (r - 1) * work.trainable_bytes / (bandwidth * r)) / r,
            "cut_before": 2 * work.cut_before_bytes / (bandwidth * r),
            "cut_after": 2 * self._charged_after(work) / (bandwidth * r),
        }

    def _charged_after(self, work: Work) -> Floats:
        return np.where(work.is_first, 0.0, work.cut_after_bytes)
