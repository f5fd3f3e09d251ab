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

from planner.cluster import Cluster
from planner.cost import ASYNCHRONOUS
from planner.ledger import Candidate, Ledger
from planner.plan_file import ScheduleName
from planner.price import Price
from planner.simulator.pipeline import steady_minibatches, steady_s
from planner.solver.deadline import NO_HURRY, Deadline
from planner.solver.depth import DepthRule, price_with_depths, price_with_flush_depths
from planner.solver.pipelines import pipeline_for, too_large

Priced = tuple[Sequence[Candidate], Price]

SETTLED = 1e-3  # a plan this close to the time that none is below needs no rival
MOST_COMPUTATIONS = 2**16  # forwards and backwards that are simulated in one search, at each depth: a second or so
_ROUNDING = 1e-9


def simulated_price(
    ledger: Ledger,
    stages: Sequence[Candidate],
    cluster: Cluster,
    cost: Price,
    depth: DepthRule,
    schedule: ScheduleName,
    microbatches: int,
    below_s: float = math.inf,
) -> Price:
    """The cost with the seconds of the simulation, and under the schedules of 1F1B the depths that it chooses.

    The cost as it is where simulating would take too long.

    Args:
        cost: of the stages, by the resource model.
        depth: how depths are chosen.
        below_s: whether the plan can be this fast is all that matters.
    """
    if too_large(stages, schedule, microbatches):
        return cost
    if schedule in ASYNCHRONOUS:
        return price_with_depths(ledger, stages, cluster, cost, depth, schedule, microbatches, below_s)
    if schedule == "1f1b-flush":
        return price_with_flush_depths(ledger, stages, cluster, cost, depth, microbatches, below_s)
    return cost.simulated(steady_s(pipeline_for(ledger, stages, cluster, cost, schedule, microbatches)))


@dataclass
class Tally:
    """How many candidates of one search were simulated, and how much more may be.

    Attributes:
        count: candidates that were simulated.
        left: computations that may still be.
        exhausted: whether no candidate was left that could have been faster than the one chosen.
    """

    count: int = 0
    left: int = field(default_factory=lambda: MOST_COMPUTATIONS)
    exhausted: bool = True
    seen: set[tuple[Candidate, ...]] = field(default_factory=set)


@dataclass(frozen=True)
class Trials:
    """The simulations of one search, on this cluster and under this schedule."""

    cluster: Cluster
    schedule: ScheduleName
    microbatches: int
    depth: DepthRule
    deadline: Deadline = NO_HURRY
    tally: Tally = field(default_factory=Tally)

    @property
    def over(self) -> bool:
        """Whether what may be simulated is used up, or the time."""
        return self.tally.left <= 0 or self.deadline.passed

    def again(self, *, schedule: ScheduleName | None = None, depth: DepthRule | None = None) -> Trials:
        """For another question in the same search, whose candidates are new though their stages may not be."""
        self.tally.seen.clear()
        return replace(self, schedule=schedule or self.schedule, depth=depth or self.depth)

    def price(self, ledger: Ledger, stages: Sequence[Candidate], cost: Price, below_s: float = math.inf) -> Price:
        """See `simulated_price`."""
        priced = simulated_price(
            ledger, stages, self.cluster, cost, self.depth, self.schedule, self.microbatches, below_s
        )
        if priced.cost_model_s is not None:
            shape = pipeline_for(ledger, stages, self.cluster, priced, self.schedule, self.microbatches).shape
            self.tally.count += 1
            self.tally.seen.add(tuple(stages))
            self.tally.left -= 2 * len(stages) * self.microbatches * steady_minibatches(shape)
        return priced

    def fastest(self, ledger: Ledger, candidates: Iterable[Priced], best: Priced | None = None) -> Priced:
        """The fastest of some candidates, at least one, with its simulated price.

        Args:
            ledger: of the model.
            candidates: with their costs; the first of equals is preferred.
            best: one that has been simulated.
        """
        ordered = sorted(candidates, key=lambda candidate: candidate[1].seconds_per_minibatch)
        least_s = ordered[0][1].seconds_per_minibatch
        for stages, cost in ordered:
            if best is None:
                best = stages, self.price(ledger, stages, cost)
                continue
            best_s = best[1].seconds_per_minibatch
            if cost.seconds_per_minibatch >= best_s * (1 - _ROUNDING) or best_s <= least_s * (1 + SETTLED):
                break
            if tuple(stages) in self.tally.seen:
                continue
            if self.over:
                self.tally.exhausted = False
                break
            priced = self.price(ledger, stages, cost, best_s)
            if priced.seconds_per_minibatch < best_s * (1 - _ROUNDING):
                best = stages, priced
        assert best is not None
        return best
