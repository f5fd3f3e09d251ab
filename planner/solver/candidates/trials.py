"""Which of several candidates is the fastest when it is simulated.

The cost model knows how long each resource is busy, and the search is exact for it. What workers wait for messages and
for each other, and what links do when several things cross them at once, only the simulation of the schedule tells. It
takes no less than the cost model says. So candidates are simulated best first, by the cost model, and as soon as the
next one would be no faster even without waiting, none of the rest can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.price import Price
from planner.cost.rounding import SLACK
from planner.formats.cluster import Cluster
from planner.schedule.schedule import Schedule
from planner.solver.candidates.budget import Tally
from planner.solver.candidates.depth import DepthRule, price_with_depths, price_with_flush_depths
from planner.solver.candidates.pipelines import pipeline_for, too_large

Priced = tuple[Sequence[Candidate], Price]

SETTLED = 1e-3  # a plan this close to the time that none is below needs no rival


def simulated_price(
    layer_costs: LayerCosts,
    stages: Sequence[Candidate],
    cluster: Cluster,
    cost: Price,
    depth: DepthRule,
    schedule: Schedule,
    microbatches: int,
    below_s: float = math.inf,
    tally: Tally | None = None,
) -> Price:
    """The cost with the seconds of the simulation, and under the schedules of 1F1B the depths that it chooses.

    The cost as it is where simulating would take too long, or longer than the tally allows.

    Args:
        cost: of the stages, by the resource model.
        depth: how depths are chosen.
        below_s: whether the plan can be this fast is all that matters.
        tally: of what may be simulated; without a limit when None. It counts for nothing where `below_s` is infinite,
            but for its deadline: a plan needs a time.
    """
    tally = tally or Tally.unlimited()
    if too_large(stages, schedule, microbatches):
        return cost
    if schedule.asynchronous:
        return price_with_depths(layer_costs, stages, cluster, cost, depth, schedule, microbatches, below_s, tally)
    if schedule.deepens:
        return price_with_flush_depths(layer_costs, stages, cluster, cost, depth, microbatches, below_s, tally)
    pipeline = pipeline_for(layer_costs, stages, cluster, cost, schedule, microbatches)
    seconds = tally.steady_s(pipeline, needed=math.isinf(below_s))
    return cost if seconds is None else cost.simulated(seconds)


@dataclass(frozen=True)
class Trials:
    """The simulations of one search, on this cluster and under this schedule."""

    cluster: Cluster
    schedule: Schedule
    microbatches: int
    depth: DepthRule
    tally: Tally = field(default_factory=Tally)

    def again(self, *, schedule: Schedule | None = None, depth: DepthRule | None = None) -> Trials:
        """For another question in the same search, whose candidates are new though their stages may not be."""
        self.tally.seen.clear()
        return replace(self, schedule=schedule or self.schedule, depth=depth or self.depth)

    def price(
        self, layer_costs: LayerCosts, stages: Sequence[Candidate], cost: Price, below_s: float = math.inf
    ) -> Price:
        """See `simulated_price`."""
        priced = simulated_price(
            layer_costs, stages, self.cluster, cost, self.depth, self.schedule, self.microbatches, below_s, self.tally
        )
        if priced.cost_model_s is not None:
            self.tally.count += 1
            self.tally.seen.add(tuple(stages))
        return priced

    def fastest(self, layer_costs: LayerCosts, candidates: Iterable[Priced], best: Priced | None = None) -> Priced:
        """The fastest of some candidates, at least one, with its simulated price.

        Args:
            layer_costs: of the model.
            candidates: with their costs; the first of equals is preferred.
            best: one that has been simulated.
        """
        ordered = sorted(candidates, key=lambda candidate: candidate[1].seconds_per_minibatch)
        least_s = ordered[0][1].seconds_per_minibatch
        for stages, cost in ordered:
            if best is None:
                best = stages, self.price(layer_costs, stages, cost)
                continue
            best_s = best[1].seconds_per_minibatch
            if cost.seconds_per_minibatch >= best_s * (1 - SLACK) or best_s <= least_s * (1 + SETTLED):
                break
            if tuple(stages) in self.tally.seen:
                continue
            if self.tally.over:
                self.tally.exhausted = False
                break
            priced = self.price(layer_costs, stages, cost, best_s)
            if priced.cost_model_s is not None and priced.seconds_per_minibatch < best_s * (1 - SLACK):
                best = stages, priced
        assert best is not None
        return best
