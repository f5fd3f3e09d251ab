"""Exact search for synchronous pipelines: minimise a sum over the stages plus a maximum over them.

    seconds = sum over stages of sum_s  +  max over stages of max_s

The plan of least sum within a limit on the maximum is found by a walk (`least_sum`), and the best
plan among the answers to ever smaller limits (`planner.solver.search.trade`).

In a cluster of thousands of GPUs, all counts are multiples of a unit, or the tables would fill the
memory. What is found then may not be the best (`interrupted`).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from planner.cost.models.synchronous import SynchronousModel
from planner.cost.work import Floats, Integers, Work
from planner.formats.files import replace
from planner.solver.clock import NO_LIMIT, OutOfTimeError
from planner.solver.problem.problem import Limits
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.least_sum import Walk
from planner.solver.search.chain.variants import Stages, StageTables, StageVariants
from planner.solver.search.trade import trade_offs
from planner.solver.tuning.searches import SynchronousTuning


@dataclass
class _Known:
    """All stages of a space, and the plans that were met on the way to what was asked of them."""

    stages: list[Stages]
    met: dict[Hashable, list[CutPath]] = field(default_factory=dict)


class SynchronousSearch:
    """Finds the fastest gpipe or 1f1b-flush plan, in which all replicas are multiples of a number.

    Attributes:
        interrupted: whether there may be faster plans than the answer.
        found: the plans that were met on the way to the best: each has a larger sum and a smaller
            maximum.
    """

    def __init__(
        self, space: CutSpace, model: SynchronousModel, limits: Limits, multiple: int = 1
    ) -> None:
        self.space = space
        self.model = model
        self.limits = limits
        self.interrupted = False
        self.found: list[CutPath] = []

        # Replicas beyond the number of microbatches would idle.
        most_replicas = min(limits.gpus, model.microbatches, limits.most_replicas)
        gpus = min(limits.gpus, most_replicas * (len(space) - 1))
        self._tuning = limits.tuning.synchronous
        self._unit = _unit(len(space), limits.gpus, most_replicas, self._tuning)
        self._variants = StageVariants(space, limits)
        self._known = self._tables(most_replicas, gpus)
        self._asked = multiple, limits.rules.max_stages

        replicas = np.arange(1, most_replicas // self._unit + 1)
        stages = self._known.stages
        if multiple > 1:
            uneven = (replicas * self._unit % multiple > 0)[:, None]
            stages = [replace(each, max_s=np.where(uneven, np.nan, each.max_s)) for each in stages]

        self._walk = Walk(
            stages,
            replicas,
            gpus // self._unit,
            self._unit,
            limits.clock,
            limits.tuning.arrays.batch_entries,
        )

    def best(self, below_s: float = np.inf, precision: float = RESOLUTION) -> CutPath | None:
        """Return the fastest plan, with few GPUs among equally fast ones; None if no plan fits the
        memory.

        Others may be faster by `precision`, and plans that take `below_s` or longer may be missed.
        Raise OutOfTimeError if the deadline passes before there is any plan.
        """
        if self._unit > 1:
            precision = max(precision, self._tuning.unit_precision)
        asked = (*self._asked, precision, below_s)
        if asked in self._known.met:
            self.found = self._known.met[asked]
        else:
            self._meet(below_s, precision)
            if not self.interrupted:
                self._known.met[asked] = self.found

        return min(self.found, key=lambda path: path.seconds, default=None)

    def _meet(self, below_s: float, precision: float) -> None:
        """Find plans of growing sum and falling maximum, among them the fastest."""
        limit_s = self._first_limit_s(below_s, precision)
        for path in trade_offs(self.within, limit_s, below_s=below_s, step=precision):
            self.found.append(path)
        self.interrupted |= self._unit > 1

    def within(self, limit_s: float) -> CutPath | None:
        """Return the path of least sum with a maximum within the limit; None without one, or if
        time ended.

        Raise OutOfTimeError if the deadline passes before any plan was met.
        """
        try:
            return self.limits.of_few_stages(
                partial(self._walk.within, limit_s), self.space, self._walk.gpus
            )
        except OutOfTimeError:
            if not self.found:
                raise
            self.interrupted = True
            return None

    def _first_limit_s(self, below_s: float, precision: float) -> float:
        """Return a limit that leaves out nothing but plans that are of no use."""
        if np.isfinite(below_s):
            return below_s - self._least_s
        if precision > RESOLUTION:
            return self._promising_s()
        return np.inf

    def _promising_s(self) -> float:
        """Return a limit that leaves out nothing but plans slower than one that is balanced
        well.
        """
        balanced_s = float(self.model.microbatches * self._everything.compute_s[0])
        gpus = self._walk.gpus * self._unit
        limit_s = balanced_s / gpus
        if limit_s <= 0 or self.within(np.inf) is None:
            return np.inf

        answer = self.within(limit_s)
        while answer is None:
            limit_s *= self._tuning.limit_ratio
            answer = self.within(limit_s)

        enough_s = answer.seconds * self._tuning.limit_ratio
        return max(enough_s - self._least_s, answer.max_s)

    @property
    def _everything(self) -> Work:
        """The work of all layers as one stage."""
        return self.space.work(0, np.array([len(self.space) - 1]))

    @property
    def _least_s(self) -> float:
        """Seconds that no plan's sum is below: those of one stage that waits for no messages."""
        least = self.limits.least(self._everything, self.space.layer_costs.profile)
        return float(self.model.sum_s(least.without_transfers())[0])

    def _tables(self, most_replicas: int, gpus: int) -> _Known:
        """Return the stages of the space for this model, which other searches over it share."""
        model = self.model
        tables: dict[Hashable, _Known] = self.space.memo.table(SynchronousSearch, dict)

        # 1. Links that take the same seconds are one key, however their all-reduces' bandwidth is
        #    written.
        rules = replace(self.limits.rules, max_stages=None)
        alike = replace(self.limits, clock=NO_LIMIT, rules=rules)
        link = replace(model.link, all_reduce_bandwidth_bytes_per_s=model.link.ring_bytes_per_s)
        key = model.schedule.name, model.microbatches, link, alike

        # 2. What is not known yet is computed.
        if key not in tables:

            def parts_s(work: Work, replicas: Integers) -> tuple[Floats, Floats]:
                return model.sum_s(work), model.max_s(work, replicas)

            stages = StageTables(
                self._variants,
                model.schedule,
                model.microbatches,
                parts_s,
                most_replicas,
                gpus,
                self._unit,
            )
            tables[key] = _Known(stages.all())

        # 3. Too much to keep is forgotten.
        known = tables[key]
        entries = sum(stages.after.size for each in tables.values() for stages in each.stages)
        if entries > self._tuning.most_kept_entries:
            tables.clear()
        return known


def _unit(states: int, gpus: int, most_replicas: int, tuning: SynchronousTuning) -> int:
    """Return in how many GPUs at a time they are counted; twice the GPUs have twice the unit."""
    unit = 1
    if gpus <= tuning.most_single_gpus:
        return unit

    entries = states**2 // 2 * most_replicas
    while unit < most_replicas and entries // unit > tuning.most_entries:
        unit *= 2
    return unit
