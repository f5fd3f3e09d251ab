"""What the published cost models share: they charge stages for their cuts, and know no places."""

from __future__ import annotations

from planner.cost.models.cost_model import StageModel
from planner.cost.placement import Busy, Placement


class PublishedModel(StageModel):
    """A published cost model, whose devices have links of their own.

    On clusters of several levels, a cut is priced for each of its two stages, from the stage's farthest rank to the
    nearest one across the cut.
    """

    def placed_s(self, placement: Placement) -> list[Busy]:
        return [self._placed_s(placement, stage) for stage in range(len(placement.works))]

    def _placed_s(self, placement: Placement, stage: int) -> Busy:
        topology, ranks = placement.topology, placement.ranks

        def between(one: int, other: int) -> Busy:
            model = type(self)(topology.link(int(topology.level(one, other))))
            return model.resources_s(placement.works[stage], placement.replicas[stage])

        own = ranks[stage]
        within = between(own[0], own[-1])
        busy: Busy = {"compute": within["compute"]}
        if stage > 0:
            busy["cut_before"] = between(own[0] - 1, own[-1])["cut_before"]
        if stage < len(ranks) - 1 and "cut_after" in within:
            busy["cut_after"] = between(own[0], own[-1] + 1)["cut_after"]
        return busy
