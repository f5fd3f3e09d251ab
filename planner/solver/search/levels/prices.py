"""Prices of paths on clusters of several levels, which local searches minimise."""

from dataclasses import dataclass

import numpy as np

from planner.cost.pricing import busy_resources
from planner.cost.setting import Setting
from planner.solver.evaluate.evaluation import priced_path
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath, stages_along
from planner.solver.problem.states import CutSpace


@dataclass(frozen=True)
class PathPrices:
    """The prices of paths over one space."""

    problem: Problem
    space: CutSpace

    def seconds(self, path: CutPath) -> float:
        """Return seconds per minibatch by the cost model; infinite where memory is lacking."""
        plan = priced_path(self.problem, self.space, path)
        if self.problem.allows(plan):
            return plan.seconds
        return np.inf

    def strain(self, path: CutPath) -> float:
        """Return the seconds and a thousandth for how uneven the stages are.

        Where several resources are equally busy, no single step of local search lowers the seconds;
        evening out does. With b_s the seconds of the busiest resource of each of the r_s replicas
        of stage s, and b the most of these, that is

            b + 1/1000 · Σ r_s · b_s² / (GPUs · b)
        """
        if not self.problem.schedule.stashes:
            return self.seconds(path)
        if self._may_be_forbidden and not np.isfinite(self.seconds(path)):
            return np.inf

        busy_s = self._busiest_s(path)
        most_s = max(busy_s)
        if most_s <= 0:
            return most_s
        squares = sum(
            replicas * stage_s**2 for replicas, stage_s in zip(path.replicas, busy_s, strict=True)
        )
        uneven_share = self.problem.tuning.levels.uneven_share
        return most_s + uneven_share * squares / self.problem.cluster.gpus / most_s

    @property
    def _may_be_forbidden(self) -> bool:
        """Whether a path may be one that the problem does not allow, so that each must be
        priced.
        """
        limits = self.problem.limits
        return limits.counts_gpus or limits.rules.max_stages is not None

    def _busiest_s(self, path: CutPath) -> list[float]:
        """Return the seconds of the busiest resource of each stage."""
        stages = stages_along(self.space, path)
        setting = Setting(self.problem.cluster)
        resources = busy_resources(self.space.layer_costs, stages, setting)
        return [max(float(seconds) for seconds in each.values()) for each in resources]
