"""What the published cost models share: they charge stages for their cuts, and know no places."""

from __future__ import annotations

import numpy as np

from planner.cost.models.cost_model import PlanTime, StageModel, UnpricedPlan
from planner.cost.network.placement import Busy, Placement
from planner.cost.network.topology import Ranks, Topology
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
        return [self._placed_s(placement, stage) for stage in range(len(placement.works))]

    def _placed_s(self, placement: Placement, stage: int) -> Busy:
        topology, ranks = placement.topology, placement.ranks

        def between(one: int, other: int) -> Busy:
            model = type(self)(topology.link(int(topology.level(one, other))))
            return model.resources_s(placement.works[stage], placement.replicas[stage])

        own = ranks[stage]
        within = between(min(own), max(own))
        busy: Busy = {"compute": within["compute"]}
        if stage > 0:
            busy["cut_before"] = between(*_farthest(topology, own, ranks[stage - 1]))["cut_before"]
        if stage < len(ranks) - 1 and "cut_after" in within:
            busy["cut_after"] = between(*_farthest(topology, own, ranks[stage + 1]))["cut_after"]
        return busy


def _farthest(topology: Topology, own: Ranks, others: Ranks) -> tuple[int, int]:
    """Return the rank of a stage that is farthest from its nearest rank of another stage, and that one."""
    if isinstance(own, range) and isinstance(others, range):  # the ends say it all
        return (own[-1], others[-1]) if others[0] < own[0] else (own[0], others[0])
    levels = topology.level(np.asarray(own)[:, None], np.asarray(others)[None, :])
    one = int(levels.min(axis=1).argmax())
    return own[one], others[int(levels[one].argmin())]
