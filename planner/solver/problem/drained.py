"""A bound on the plans of synchronous schedules with one stage per worker, which knows the bubble and the memory.

Of a plan on N GPUs, stage s has c_s seconds per microbatch, what it recomputes included, and r_s replicas. Its time is
at least the sum of all c_s, which the first microbatch takes, plus the largest (m/r_s - 1)·c_s of m microbatches, here
X. So r_s >= m·c_s / (X + c_s), and if no stage that fits the memory takes more than c,

    N >= m·(sum of c_s) / (X + c)        time >= (1 + m/N)·(sum of c_s) - c

With stages of equal lengths on equally many replicas d = N/p that is the published bubble, (p - 1)·d/m.

The memory says how much must recompute at least. The replicas of a stage hold together, for each layer, as many
microbatches as there are GPUs from the stage on: at least a·(seconds of the layers from this one on), with
a = m / (X + c), up to m. All GPUs have room for the model's state once, and for that. What exceeds the room is saved by
recomputing those layers first that take least time for it (the relaxed knapsack of Dantzig 1957).

A single stage takes what its price says without recomputation, and no less than its computation with as much of it as
fits the memory.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from planner.cost.candidate import StageOptions
from planner.cost.recomputation import units_of
from planner.cost.work import Floats
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import column, uncut_groups
from planner.units import SLACK

STEPS = 64  # of X, between which the bound takes the better end of each of its parts


def drained_s(problem: Problem) -> float:
    """Return seconds per minibatch that no plan is below by the cost model; infinity where no plan fits the memory.

    The problem's schedule is synchronous, with one stage per worker and whole backwards, and its GPUs are alike.
    """
    groups = uncut_groups(problem.layer_costs)
    drained, several = _Drained(problem, groups), len(groups) > 1 and problem.cluster.gpus > 1
    return drained.alone_s(drained.several_s() if several else np.inf, sorted({0, *problem.levels}))


def with_single_stages(problem: Problem, bound_s: float) -> float:
    """Return a bound on other plans, or on a single stage whose replicas divide gradients and weights, if less."""
    levels = [level for level in problem.levels if level > 1]
    return _Drained(problem, uncut_groups(problem.layer_costs)).alone_s(bound_s, levels)


class _Drained:
    """The least time of the plans of a problem, with a row for each group of layers that no cut may separate."""

    def __init__(self, problem: Problem, groups: Sequence[tuple[int, ...]]) -> None:
        self._problem, self._groups, costs, starts = problem, groups, problem.layer_costs, [each[0] for each in groups]

        def of_groups(name: str) -> Floats:
            return np.asarray(np.add.reduceat(column(costs, name), starts))

        self._forward_s, self._saved = of_groups("forward_s"), of_groups("saved_bytes")
        self._own_s = self._forward_s + of_groups("backward_s")
        # Of a single microbatch, gradients may not exist all at once.
        gradients = of_groups("gradient_bytes") if problem.microbatches > 1 else 0.0
        self._kept, self._optimizer = of_groups("weight_bytes") + gradients, of_groups("optimizer_bytes")
        memory, overheads = problem.cluster.memory_bytes, costs.overheads
        room = memory if memory is None or overheads is None else overheads.reserve(0).room(memory)
        self._memory = np.inf if room is None else float(room)
        self._most = min(problem.cluster.gpus, problem.microbatches, problem.most_replicas)

    def alone_s(self, below_s: float, levels: Sequence[int]) -> float:
        """Return the least seconds of a single stage of one of these levels, or `below_s` if that is less."""
        problem, once_s, costs = self._problem, float(self._own_s.sum()), self._problem.layer_costs
        # Its blocks recompute one by one, as all at once save nothing at the peak, and keep what enters them.
        units = units_of(costs, range(len(costs.block_of)))
        saved, forward_s = (
            np.array([sum(getattr(costs.profile.layers[each], name) for each in unit) for unit in units], dtype=float)
            for name in ("saved_bytes", "forward_s")
        )
        entering = [costs.entering(unit) for unit in units]
        shared = Counter(value for each in entering for value in each)
        entering_bytes = [sum(costs.traffic[value].output_bytes for value in each) for each in entering]
        gains = saved - [sum(costs.traffic[n].output_bytes for n in each if shared[n] == 1) for each in entering]
        for level in levels:  # a single replica divides nothing
            for replicas in range(self._most, int(level > 0), -1):
                share = -(-problem.microbatches // replicas)
                if share * once_s >= below_s:
                    break
                if level > 1 and problem.microbatches % replicas:
                    continue
                parts = [replicas if level > least else 1 for least in (0, 1)]
                state = self._optimizer.sum() / parts[0] + self._kept.sum() / parts[1]
                if state > self._memory:
                    continue
                again_s = self._again_s(state + saved.sum() - self._memory, gains, forward_s)
                if (least_s := share * (once_s + again_s)) >= below_s:
                    continue
                options = StageOptions(replicas, level)
                plain, lean = (replace(options, recompute=groups) for groups in ((), tuple(map(frozenset, units))))
                # A block that does not recompute keeps no values that enter it, and all else.
                (held,) = problem.price([replace(costs.single_stage, options=lean)]).gpu_bytes
                if again_s == 0 or held - max(entering_bytes) <= (problem.cluster.memory_bytes or held):
                    plain_s = problem.price([replace(costs.single_stage, options=plain)]).seconds_per_minibatch
                    below_s = min(below_s, max(least_s, plain_s))
        return below_s

    def several_s(self) -> float:
        """Return seconds that no plan of two stages or more is below."""
        problem, gpus, microbatches = self._problem, self._problem.cluster.gpus, self._problem.microbatches
        # How long the longest stage is that fits, and how few hold the whole model.
        divided = self._most if max(problem.levels) > 0 else 1
        sums = np.concatenate(([0.0], np.cumsum(self._kept + self._optimizer / divided)))
        ends = np.searchsorted(sums, sums + self._memory, side="right") - 1
        again_s = 0.0 if problem.recompute == "never" else self._forward_s
        most_s = np.concatenate(([0.0], np.cumsum(self._own_s + again_s)))
        longest_s, stages, end = float(np.max(most_s[ends] - most_s)), 0, 0
        while end < len(self._groups) and ends[end] > end:
            stages, end = stages + 1, int(ends[end])
        state = float(self._kept.sum() + self._optimizer.sum())
        if end < len(self._groups) or state > gpus * self._memory:
            return np.inf
        once_s, ratio = float(self._own_s.sum()), microbatches / gpus
        filling_s = once_s + max(1, stages - 1) * self._crossing_s()
        after_s = np.cumsum(self._own_s[::-1])[::-1]
        least_s = max(0.0, ratio * once_s - longest_s)
        limits_s = np.linspace(least_s, least_s + (1 + ratio) * float(self._forward_s.sum()), STEPS + 1)
        found_s = float(limits_s[-1] + filling_s)
        for begin_s, end_s in pairwise(limits_s.tolist()):
            flying = np.minimum(microbatches * after_s / max(end_s + longest_s, SLACK), microbatches)
            held = self._saved * flying
            more_s = self._again_s(state + float(held.sum()) - gpus * self._memory, held, self._forward_s)
            busiest_s = max(begin_s, ratio * (once_s + more_s) - longest_s)
            found_s = min(found_s, filling_s + more_s + busiest_s)
        return found_s

    def _crossing_s(self) -> float:
        """Return the least seconds of a microbatch's messages over a cut, both ways, over the nearest link."""
        costs, link = self._problem.layer_costs, self._problem.topology.link(0)
        number = np.repeat(np.arange(len(self._groups)), list(map(len, self._groups)))
        moved_bytes = np.zeros(len(self._groups) - 1)
        for value in costs.traffic:  # what a group makes for the next one crosses the cut between them, and no other
            if number[value.users[0]] == number[value.producer] + 1:
                moved_bytes[number[value.producer]] += value.sent_bytes + value.returned_bytes
        return float(moved_bytes.min()) / link.bandwidth_bytes_per_s

    def _again_s(self, excess: float, gains: Floats, forward_s: Floats) -> float:
        """Return the least seconds of forwards that run again and gain this many bytes; infinity without any."""
        if self._problem.recompute in ("always", "blocks"):
            return float(forward_s.sum())
        if excess <= 0:
            return 0.0
        useful = np.flatnonzero(gains > 0)
        order = useful[np.argsort(forward_s[useful] / gains[useful])]
        gained, spent = np.cumsum(gains[order]), np.cumsum(forward_s[order])
        if self._problem.recompute == "never" or not len(order) or gained[-1] < excess:
            return np.inf
        return float(np.interp(excess, np.concatenate(([0.0], gained)), np.concatenate(([0.0], spent))))
