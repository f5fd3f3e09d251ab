"""Plans whose stages divide their layers over ranks (tensor parallelism), beside replicas, sharding and recomputation.

With groups of one size in all stages, a plan is a plan for a cluster of groups: for each size there is the whole
search. Stages with groups of several sizes are sought on clusters of one level, under asynchronous schedules
(`MixedDegrees`); elsewhere they only count for the bound.

A replica of t ranks counts t GPUs, and one unit in flight before it. So for a target T each state keeps the pairs of
GPUs and replicas after it that no other one beats in both, and the walk of `planner.solver.search.chain.search` goes
over them:

    pairs(I) = best of  pairs(J) + (t·r, r)    with r the fewest replicas of t ranks for I to J that meet T and fit

(Tarnawski et al., "Piper", NeurIPS 2021, have a table over both instead.)
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.candidate import StageOptions
from planner.cost.recomputation import exact_everywhere
from planner.cost.work import Floats, Integers
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.plan.blocks import block_ends
from planner.solver.evaluate.evaluation import fastest, priced
from planner.solver.methods import cut_after
from planner.solver.problem.bounds import Bounds, least_times
from planner.solver.problem.budget import OutOfTimeError
from planner.solver.problem.problem import Answer, Limits, Problem
from planner.solver.problem.result import RESOLUTION, CutPath, Found, stages_along
from planner.solver.problem.states import BySize, Chain, StateSpace
from planner.solver.relaxed_steps import solve_with_room
from planner.solver.search.chain.fewest import FewestReplicas
from planner.solver.search.chain.search import ANY_TIME_S
from planner.solver.search.pipeline_search import PipelineSearch
from planner.units import SLACK


def solve_degrees(problem: Problem, answer: Answer) -> Found:
    """Find the best plan whose stages have the degrees that the rules allow; `answer` divides no layers."""
    degrees, mixes = problem.rules.tensor, _mixes(problem)
    if degrees == (1,):
        return answer(problem)
    found = list[Found]()
    obstacle: PlannerError | None = None
    missed = list[int]()  # degrees that were not searched

    def apart(share: float) -> Problem:
        """Return the problem with part of the time and a budget of its own: the same stages are other plans."""
        return replace(problem, budget=replace(budget.apart(), deadline=budget.deadline.earlier(share)))

    budget = problem.budget
    # The more promising degrees are searched first, because others may not be worth a search then.
    least_s = {degree: PipelineSearch(problem.on_groups_of(degree)).relaxed_s() for degree in degrees}
    order = degrees if problem.schedule.asynchronous else sorted(degrees, key=lambda degree: least_s[degree])
    for number, degree in enumerate(order):
        best_s = min((each.best.counted_s for each in found), default=math.inf)
        if found and not mixes and (best_s < least_s[degree] or problem.deadline.passed):
            missed.append(degree)
            continue
        left = len(degrees) + mixes - number
        own = apart(1 / (left if problem.schedule.asynchronous else min(left, 2)))
        try:
            alone = answer(own.on_groups_of(degree))
        except InputError:
            raise
        except PlannerError as error:  # that there was too little time says more than that nothing fits
            obstacle = error if obstacle is None or isinstance(obstacle, InfeasibleError) else obstacle
            missed += [] if isinstance(error, InfeasibleError) else [degree]
        else:
            found.append(replace(alone, best=alone.best.divided(degree)))
        budget.count += own.budget.count
        budget.exhausted &= own.budget.exhausted
    if mixes:
        own = apart(1.0)
        with suppress(InfeasibleError):
            found.append(solve_with_room(own, lambda each: _mixed(each, found)))
        budget.count += own.budget.count
    if not found:
        assert obstacle is not None
        raise obstacle
    best = min((each.best for each in found), key=lambda plan: (plan.counted_s, plan.gpus))
    bound_s, bound_of = min(each.bound_s for each in found), max(each.bound_of for each in found)
    for degree in missed:
        own = problem.on_groups_of(degree)
        if bound_of:  # then the others' bounds are of plans that cut between blocks
            own = cut_after(own, block_ends(problem.layer_costs.profile))
        bound_s = min(bound_s, PipelineSearch(own).relaxed_s())
    if len(degrees) > 1 and not mixes:
        if problem.schedule.asynchronous:  # plans of several sizes count for the bound, too
            bound_s = min(bound_s, relaxed_seconds(problem))
        else:
            bound_of = ", ".join(filter(None, (bound_of, "groups of one size")))
    return Found(best, bound_s, bound_of=bound_of)


def _mixes(problem: Problem) -> bool:
    """Return whether there is a search for plans whose stages have several degrees."""
    setting, profile = problem.setting, problem.layer_costs.profile
    alike = not problem.cluster.kinds and len(problem.cluster.joined) == 1
    plain = problem.constraints.empty and problem.rules.max_stages is None and not profile.tied_parameters
    plain &= problem.solver != "ilp" and not any(costs.by_samples for costs in profile.tensor or ())
    searched = problem.schedule.asynchronous and problem.simulates and setting.chunks == 1
    return len(problem.rules.tensor) > 1 and alike and plain and searched


def _mixed(problem: Problem, known: Sequence[Found]) -> Found:
    """Find the best plan, or return the best one that is known, with the bound of all."""
    layer_costs, below_s = problem.layer_costs, ANY_TIME_S
    ends = frozenset[int]() if problem.rules.granularity == "layer" else block_ends(layer_costs.profile)
    within = cut_after(problem, ends) if ends else problem
    spaces = cuts_by_degree(within)
    best = min((each.best for each in known), key=lambda plan: plan.counted_s, default=None)
    if best is not None:
        below_s = min(each.best.price.cost_model_s or each.best.seconds for each in known)
    path, exact, model = None, False, problem.asynchronous()
    with suppress(OutOfTimeError):
        search = MixedDegrees(spaces, model, problem.limits)
        path = search.best(below_s)
        exact = not (search.interrupted or ends) and all(
            exact_everywhere(space.layer_costs) for space in spaces.values()
        )
    if path is not None:
        mixed = fastest(problem, [priced(problem, stages_along(next(iter(spaces.values())), path))])
        below_s = min(below_s, path.seconds)
        best = mixed if best is None or mixed.saves(best) else best
    if best is None:
        raise InfeasibleError("no plan fits the memory, however its layers are divided", hint="give more GPUs")
    return Found(best, below_s if exact else relaxed_seconds(problem))


def cuts_by_degree(problem: Problem) -> dict[int, StateSpace]:
    """Return the cuts that plans may have, by degree."""
    return {degree: Chain(problem.layer_costs.at_degree(degree)) for degree in problem.rules.tensor}


def relaxed_seconds(problem: Problem) -> float:
    """Return a time that no plan is below, whatever its degrees: balanced, and each layer at the best of them."""
    every = [problem.layer_costs.at_degree(degree) for degree in problem.rules.tensor]
    weights: list[Sequence[float]] = [[1] * len(every)]
    if problem.schedule.asynchronous or problem.microbatches >= problem.cluster.gpus:
        # By the GPUs' seconds; in the first one, by those of one microbatch.
        weights.append(problem.rules.tensor)
    return max(PipelineSearch(problem.with_profile(least_times(every, each))).relaxed_s() for each in weights)


_FAR = 4.0  # ratio of the bounds from which on their geometric mean is between them
_CLOSE = 2e-3  # relative distance of the bounds from which on each question is for anything better


@dataclass(frozen=True)
class _Pairs:
    """What suffixes need, each of them a stage and a shorter suffix."""

    begins: Integers  # the state at which the suffix begins
    gpus: Integers
    replicas: Integers
    stages: Integers
    end: Integers  # of its first stage, which says its degree, too
    own: Integers  # that stage's replicas
    follows: Integers  # the number of the shorter suffix

    def unbeaten(self) -> "_Pairs":
        """Return the pairs that no other one beats in both numbers, those of fewest stages among equals."""
        order = np.lexsort((self.end, self.stages, self.replicas, self.gpus))
        replicas = self.replicas[order]
        fewer = np.concatenate(([True], replicas[1:] < np.minimum.accumulate(replicas)[:-1]))
        return _Pairs(*(column[order[fewer]] for column in vars(self).values()))


class MixedDegrees:
    """Finds the fastest pipeline over states that all degrees have in common, in the same order."""

    def __init__(self, spaces: Mapping[int, StateSpace], model: Bounds, limits: Limits) -> None:
        self._degrees: Integers = np.array([degree for degree in spaces if degree <= limits.gpus], dtype=np.int64)
        self._space = BySize([spaces[degree] for degree in self._degrees])
        self._gpus, self._limits, self._last = limits.gpus, limits, len(self._space) - 1
        self._fewest = FewestReplicas(self._space, model, limits)
        self._before_s = self._least_gpu_seconds()
        self.interrupted = False  # by the deadline: there may be faster plans

    def best(self, below_s: float) -> CutPath | None:
        """Return the fastest plan that takes less than the seconds; None without one."""
        best, best_s, stages = None, below_s, None
        for end in range(self._last, self._space.ends, len(self._space)):  # a single stage is often near the optimum
            degree = self._degree(end)
            alone = self._fewest.quickest(0, end, np.arange(1, self._gpus // degree + 1), 0)
            if alone is not None and alone[1] < best_s:
                options = replace(alone[0], tensor=degree)
                best, best_s = CutPath((0, self._last), (options,), alone[1]), alone[1]
        low_s = float(self._before_s[-1]) / self._gpus * (1 - RESOLUTION)
        # Where no single stage will do, there may be nothing to find. Later, asking for anything better ends the
        # search, and halving finds good plans.
        missed, patience = (0, 1) if best is not None else (1, 1)
        while low_s < (goal_s := best_s * (1 - RESOLUTION)):
            if self._limits.deadline.passed:
                self.interrupted = True
                break
            middle_s = (low_s + goal_s) / 2 if goal_s < _FAR * low_s else (low_s * goal_s) ** 0.5
            strict = missed >= patience or goal_s - low_s < _CLOSE * goal_s
            target_s = goal_s if strict else middle_s
            if (found := self._walk(target_s)) is None:
                low_s, missed = target_s, missed + 1
            else:
                stages, best_s = found, self._path(found, target_s).seconds
                missed, patience = 0, 2 * patience if strict else patience
        return best if stages is None else self._path(stages, best_s)

    def within(self, target_s: float) -> CutPath | None:
        """Return a plan with the fewest GPUs that meets the target; None without one."""
        stages = self._walk(target_s)
        return None if stages is None else self._path(stages, target_s)

    def _walk(self, target_s: float) -> Integers | None:
        """Return the stages of such a plan: their first and last states, replicas, and replicas after them."""
        nothing = np.zeros(1, dtype=np.int64)
        pairs = _Pairs(np.array([self._last]), *[nothing] * 6)
        room = np.floor(self._gpus - self._before_s / target_s + SLACK).astype(np.int64)
        for state in range(self._last - 1, -1, -1):
            self._limits.deadline.check()
            if room[state] >= 1 and (found := self._from(state, pairs, target_s, int(room[state]))) is not None:
                pairs = _Pairs(*map(np.concatenate, zip(vars(pairs).values(), vars(found).values(), strict=True)))
        if pairs.begins[-1] > 0:
            return None
        stages, number = list[tuple[int, int, int, int]](), int(np.argmax(pairs.begins == 0))
        while number:
            state, _, replicas, _, end, r, follows = (int(column[number]) for column in vars(pairs).values())
            stages.append((state, end, r, replicas - r))
            number = follows
        return np.array(stages)

    def _from(self, state: int, pairs: _Pairs, target_s: float, room: int) -> _Pairs | None:
        """Return the pairs of suffixes that begin at the state, within so many GPUs."""
        follows = np.arange(len(pairs.begins))
        count, sizes = len(self._degrees), np.arange(len(self._degrees)) * len(self._space)
        others = (sizes[:, None] + pairs.begins[follows]).ravel()
        degree, follows = np.repeat(self._degrees, len(follows)), np.tile(follows, count)
        most = (room - pairs.gpus[follows]) // degree
        rows = np.flatnonzero(self._fewest.least(state, others, target_s) <= most)
        if not len(rows):
            return None
        others, degree, follows, most = others[rows], degree[rows], follows[rows], most[rows]
        after = pairs.replicas[follows]
        r, _ = self._fewest.fewest(state, others, target_s, after, most)
        rows = np.flatnonzero(r <= most)
        if not len(rows):
            return None
        r, follows = r[rows], follows[rows]
        return _Pairs(
            np.full(len(rows), state, dtype=np.int64),
            pairs.gpus[follows] + degree[rows] * r,
            after[rows] + r,
            pairs.stages[follows] + 1,
            others[rows],
            r,
            follows,
        ).unbeaten()

    def _path(self, stages: Integers, target_s: float) -> CutPath:
        options, seconds = list[StageOptions](), 0.0
        for state, end, r, after in stages.tolist():
            best = self._fewest.quickest(state, end, np.array([r]), after, target_s)
            assert best is not None
            options.append(replace(best[0], tensor=self._degree(end)))
            seconds = max(seconds, best[1])
        return CutPath((*stages[:, 0].tolist(), self._last), tuple(options), seconds)

    def _least_gpu_seconds(self) -> Floats:
        """Return GPU seconds of the layers before each state, at least, however they are divided."""
        least, before_s = np.zeros(self._last + 1), self._fewest.before_s.reshape(len(self._degrees), -1)
        before_s = self._degrees[:, None] * before_s
        for state in range(1, self._last + 1):
            least[state] = np.min(least[:state] + before_s[:, state, None] - before_s[:, :state])
        return least

    def _degree(self, end: int) -> int:
        return int(self._degrees[end // len(self._space)])
