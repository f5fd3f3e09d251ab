"""The ways to run stages: whether the optimizer's state is sharded, and which layers recompute.

Searches ask for many stages at once, and every way of every stage is a row: every choice of recomputing layers that
some memory limit could make the best one (`planner.cost.recomputation`), the quickest first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.candidate import Groups, StageOptions, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Link
from planner.cost.recomputation import Choices, Recomputation
from planner.cost.work import Floats, Footprint, Integers, Record, Work
from planner.options.solving import UNLIMITED, RecomputeRule
from planner.schedule.schedule import Schedule
from planner.solver.problem.bounds import balanced_s
from planner.solver.problem.drained import drained_s
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.states import Chain


@dataclass(frozen=True)
class BestWays:
    """The best ways to run the stages of plans, which have room for `deeper` times the published depths."""

    problem: Problem
    space: Chain
    deeper: float = 1.0
    _known: dict[tuple[int, int, int, int], StageOptions] = field(default_factory=dict, compare=False)

    @cached_property
    def _ways(self) -> "WaysOf":
        return WaysOf(self.space, self.problem.limits)

    def options(self, states: Sequence[int], replicas: Sequence[int]) -> tuple[StageOptions, ...]:
        """Return how each stage is quickest among the ways that fit the memory; the plainest way where none does."""
        after, found = sum(replicas), list[StageOptions]()
        limited = self.problem.cluster.memory_bytes is not None
        for (state, other), r in zip(pairwise(states), replicas, strict=True):
            after -= r
            key = (state, other, r, after if limited else 0)
            if key not in self._known:
                self._known[key] = self._stage(state, other, r, after)
            found.append(self._known[key])
        return tuple(found)

    def _stage(self, state: int, other: int, r: int, after: int) -> StageOptions:
        ways = self._ways.all(state, np.array([other]))
        row = self._best(ways, r, after)
        if row is None and self._ways.chooses:
            ways = self._ways.all(state, np.array([other]), np.array([True]))
            row = self._best(ways, r, after)
        return ways.options(row or 0, r)

    def _best(self, ways: "Ways", replicas: int, after: int) -> int | None:
        problem, memory_bytes = self.problem, self.problem.cluster.memory_bytes
        fits = ways.allowed(replicas) & np.ones(len(ways), dtype=bool)
        if memory_bytes is not None:
            flying = int(problem.schedule.in_flight(replicas, after, problem.microbatches))
            flying = math.ceil(flying * self.deeper) if after else flying
            footprint = ways.footprint_on(replicas).divided(problem.microbatches)
            fits = fits & (footprint.total_bytes(flying, problem.schedule.versions(flying)) <= memory_bytes)
        if not fits.any():
            return None
        sum_s, max_s = problem.parts_s(ways.work, replicas)
        return int(np.argmin(np.where(fits, sum_s + max_s, np.inf)))


_KEPT = ("saved_bytes", "working_bytes", "accumulating_bytes")  # of a footprint, which choices decide

# Choices of the stages of a profile, which many searches over it ask for.
_KNOWN: WeakKeyDictionary[LayerCosts, dict[RecomputeRule, tuple[Recomputation, dict[tuple[int, ...], Choices]]]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class Ways:
    """Ways to run the stages from one state to others, a row each; those of a stage stand together."""

    source: "WaysOf"
    state: int
    others: Integers  # at which each row's stage ends
    stage: Integers  # its place among those that were asked for
    sharded: NDArray[np.bool_]
    choice: Integers  # of recomputing layers, by its number for the stage; 0 for what the rule says of all stages
    work: Work
    footprint: Footprint  # of a replica that has the whole state of the optimizer

    def __len__(self) -> int:
        return len(self.stage)

    def __getitem__(self, rows: Integers) -> "Ways":
        arrays = {name: getattr(self, name)[rows] for name in ("others", "stage", "sharded", "choice")}
        return replace(self, **arrays, work=taken(self.work, rows), footprint=taken(self.footprint, rows))

    @property
    def again(self) -> NDArray[np.bool_]:
        """Whether any layer recomputes."""
        return (self.choice > 0) | self.source.recomputes

    def allowed(self, replicas: ArrayLike) -> NDArray[np.bool_]:
        """Return which rows may run on so many replicas."""
        return self.source.allowed(self.sharded, replicas)

    def footprint_on(self, replicas: ArrayLike) -> Footprint:
        """Return the footprints on so many replicas each."""
        footprint = self.source.layer_costs.replicated(self.footprint, replicas)
        return footprint.shared_out(np.where(self.sharded, replicas, 1)) if self.sharded.any() else footprint

    def options(self, row: int, replicas: int) -> StageOptions:
        """Return a row as the options of a stage."""
        groups = self.source.groups(self.state, int(self.others[row]), int(self.choice[row]))
        return StageOptions(replicas, int(self.sharded[row]), groups)


class WaysOf:
    """The ways that rules and memory leave to the stages of a space."""

    def __init__(self, space: Chain, limits: Limits) -> None:
        self.space, self.limits, rules = space, limits, limits.rules
        self.layer_costs = space.layer_costs
        self.rule = rules.recompute
        self.whole_stages = limits.whole_stages and self.rule == "auto"  # all layers of a stage recompute, or none
        profile, rule = space.layer_costs.profile, rules.shard_optimizer
        limited = limits.memory_bytes is not None
        gains = limited or any(layer.update_s > 0 for layer in profile.layers)
        possible = profile.may_shard_optimizer and limits.gpus > 1
        self.most_sharded = limits.most_sharded
        self.always_shards = possible and rule == "always"
        self.shards = self.always_shards or (possible and rule == "auto" and gains)
        self.recomputes = self.rule in ("always", "blocks")  # as all stages do
        self.chooses = limited and self.rule == "auto"  # stages may choose what to recompute
        of_rules = _KNOWN.setdefault(space.layer_costs, {})
        self._recomputation, self._by_layers = of_rules.setdefault(self.rule, (space.recomputation(self.rule), {}))
        self._known: dict[tuple[int, int], Choices] = {}

    def allowed(self, sharded: NDArray[np.bool_], replicas: ArrayLike) -> NDArray[np.bool_]:
        """Return which stages may run on so many replicas: one has nothing to divide, idle ones get no part."""
        several = np.asarray(replicas) > 1
        enough = several & (np.asarray(replicas) <= self.most_sharded)
        return np.where(sharded, enough, ~several | (not self.always_shards))

    def least(self, work: Work) -> Work:
        """Return work that no way to run the stages is below."""
        work = work.recomputed() if self.recomputes else work
        return replace(work, update_s=work.update_s / self.limits.gpus) if self.shards else work

    def plainest_work(self, work: Work) -> Work:
        """Return the work of stages that are not sharded and recompute only what the rule says of all stages."""
        return work.recomputed() if self.recomputes else work

    def plainest_footprint(self, state: int, others: Integers, work: Work) -> Footprint:
        """Return the footprint of stages that recompute only what the rule says of all stages."""
        footprint = self.space.footprint(state, others, work)
        if self.rule == "always":
            return footprint.recomputed()
        if self.rule == "blocks":
            found = self._all_choices(state, others.tolist())
            return replace(footprint, **{name: _column(found, name) for name in _KEPT})
        return footprint

    def choosing(self, plainest: Ways, limited: ArrayLike, count: int) -> NDArray[np.bool_]:
        """Return which of so many stages have a reason to choose what recomputes: their plainest way is limited."""
        free = plainest.stage[~np.asarray(limited) & ~plainest.sharded]
        return ~np.isin(np.arange(count), free) & self.chooses

    def all(self, state: int, others: Integers, choosing: NDArray[np.bool_] | None = None) -> Ways:
        """Return all ways to run the stages from the state to each of others; only those `choosing` may choose."""
        choosing = np.zeros(len(others), dtype=bool) if choosing is None else choosing
        work = self.space.work(state, others)
        footprint = self.plainest_footprint(state, others, work)
        work, stage = self.plainest_work(work), np.arange(len(others))
        choice = np.zeros(len(others), dtype=np.int64)
        if self.chooses and choosing.any():
            # The first choice of each stage recomputes nothing.
            counts, more = np.ones(len(others), dtype=np.int64), dict[str, Floats]()
            if self.whole_stages:
                counts[choosing] = 2
                chosen = np.flatnonzero(choosing)
                lean = taken(footprint, chosen).recomputed()
                more = {name: getattr(lean, name) for name in _KEPT} | {"recompute_s": taken(work, chosen).forward_s}
            else:
                found = self._all_choices(state, others[choosing].tolist())
                counts[choosing] = [len(choices) for choices in found]
                more = {name: _column(found, name, 1) for name in (*_KEPT, "recompute_s")}
            stage = np.repeat(stage, counts)
            choice = np.arange(len(stage)) - np.repeat(np.cumsum(counts) - counts, counts)
            work, footprint = taken(work, stage), taken(footprint, stage)
            work = _set(work, choice > 0, {"recompute_s": more.pop("recompute_s")})
            footprint = _set(footprint, choice > 0, more)
        sharded = np.zeros(len(stage), dtype=bool)
        if self.shards:
            twice = np.repeat(np.arange(len(stage)), 2)
            sharded = np.arange(len(twice)) % 2 == 1
            stage, choice = stage[twice], choice[twice]
            work, footprint = taken(work, twice).shared_out(sharded), taken(footprint, twice)
        return Ways(self, state, others[stage], stage, sharded, choice, work, footprint)

    def groups(self, state: int, other: int, choice: int) -> Groups:
        """Return the groups of layers that recompute under a choice of a stage."""
        if self.rule == "blocks" or (choice > 0 and not self.whole_stages):
            return self._all_choices(state, [other])[0].groups(choice)
        return whole_stage(self.space.layers(state, other), self.recomputes or choice > 0)

    def _all_choices(self, state: int, others: Sequence[int]) -> list[Choices]:
        """Return the choices of layers that recompute in stages; the first one of each recomputes least."""
        layers = {other: self.space.layers(state, other) for other in others if (state, other) not in self._known}
        if new := [*{each: None for each in layers.values() if each not in self._by_layers}]:
            self._by_layers.update(zip(new, self._recomputation.several(new), strict=True))
        self._known.update({(state, other): self._by_layers[each] for other, each in layers.items()})
        return [self._known[state, other] for other in others]


def relaxed_s(problem: Problem, space: Chain) -> float:
    """Return seconds that no plan is below, whatever its cuts: perfect balance, no communication, the leanest ways.

    Under synchronous schedules the bound knows the bubble and the memory, too; it is infinite where no plan fits.
    """
    ways, schedule = WaysOf(space, problem.limits), problem.schedule
    least_s = balanced_s(problem.layer_costs, problem.setting, ways.least)
    drains = schedule.formula == "synchronous" and not (schedule.splits_backward or problem.cluster.kinds)
    return max(least_s, drained_s(problem)) if drains else least_s


def most_after(schedule: Schedule, microbatches: int, replicas: Integers, most: Integers, gpus: int) -> Integers:
    """Return how many of the GPUs may follow stages with room for `most` units in flight; -1 if not even none may."""
    deepest = [schedule.deepest(r, microbatches) or UNLIMITED for r in replicas.ravel().tolist()]
    most = np.minimum(most, np.reshape(deepest, replicas.shape))
    nothing = np.zeros_like(replicas)
    with_none = schedule.in_flight(replicas, nothing, microbatches)
    with_all = schedule.in_flight(replicas, nothing + gpus, microbatches)
    return np.where(with_all <= most, gpus, np.where(with_none <= most, (most - 1) * replicas, -1))


def taken(record: Record, rows: Integers | NDArray[np.bool_] | slice | tuple[Integers, ...]) -> Record:
    """Return some rows of work or footprints, or entries of matrices; what has none is the same for all."""
    arrays = {each.name: np.asarray(getattr(record, each.name)) for each in fields(record)}
    return type(record)(**{name: array[rows] if array.ndim else array for name, array in arrays.items()})


def _column(choices: Sequence[Choices], name: str, first: int = 0) -> Floats:
    return np.concatenate([getattr(each, name)[first:] for each in choices])


def _set(record: Record, where: NDArray[np.bool_], columns: dict[str, Floats]) -> Record:
    replaced = {}
    for name, values in columns.items():
        replaced[name] = np.array(np.broadcast_to(getattr(record, name), where.shape))
        replaced[name][where] = values
    return replace(record, **replaced)


# Stages' parts of the sum over the stages, and of the maximum over them, on replicas (a column) in given ways (a row).
PartsOf = Callable[[Work, Integers], tuple[Floats, Floats]]


@dataclass(frozen=True)
class Stages:
    """The ways of use to run the stages that begin at one state, and their parts of the sum and of the maximum."""

    ways: Ways
    sum_s: Floats
    max_s: Floats  # by units of replicas - 1 and way; not a number where a way is not allowed
    after: Integers  # the most units of GPUs that may follow, likewise; -1 where the way is not allowed

    @cached_property
    def by_sum(self) -> bool:
        """Whether the ways of each stage stand by their sums."""
        return bool(np.all((np.diff(self.sum_s) >= 0) | (np.diff(self.ways.stage) > 0)))


def stages_alike(
    ways: WaysOf, schedule: Schedule, microbatches: int, parts_s: PartsOf, most_replicas: int, gpus: int, unit: int = 1
) -> list[Stages]:
    """Return the ways of use to run the stages from each state but the last, on GPUs that are counted in units.

    A way is of use if it fits, and with some replicas allows more GPUs after it than those that recompute less.
    """
    limits, space, replicas = ways.limits, ways.space, np.arange(unit, most_replicas + 1, unit)[:, None]

    def of_use(those: Ways) -> Stages:
        shape = len(replicas), len(those)
        most = np.full(shape, limits.deepest)
        if limits.memory_bytes is not None:
            footprint = those.footprint_on(replicas).divided(microbatches)
            fit = footprint.most_in_flight(limits.memory_bytes, schedule.stashes, schedule.weight_versions)
            most = np.minimum(most, fit)
        after = most_after(schedule, microbatches, replicas, most, gpus)
        after = np.where((after >= 0) & those.allowed(np.broadcast_to(replicas, shape)), after // unit, -1)
        after = np.where(_more_than_before(those, after), after, -1)
        rows = np.flatnonzero((after >= 0).any(axis=0))
        those, after = those[rows], after[:, rows]
        sum_s, max_s = parts_s(those.work, replicas)
        sum_s = np.array(np.broadcast_to(sum_s, (1, len(those)))[0])
        return Stages(those, sum_s, np.where(after >= 0, max_s, np.nan), after)

    def may_fit(state: int, others: Integers) -> Integers:
        """Return the first of `others`, and those whose stages fit if nothing is saved, on one replica or the most."""
        if limits.memory_bytes is None:
            return others
        those = ways.all(state, others)
        lean = replace(those, footprint=those.footprint.least()).footprint_on(replicas[[0, -1]]).divided(microbatches)
        fits = np.broadcast_to(lean.total_bytes(1, schedule.versions(1)) <= limits.memory_bytes, (2, len(those)))
        return others[np.isin(np.arange(len(others)), [0, *those.stage[fits.any(axis=0)]])]

    found = list[Stages]()
    for state in range(len(space) - 1):
        limits.deadline.check()
        others = may_fit(state, np.arange(state + 1, len(space)))
        plainest = of_use(ways.all(state, others))
        limited = (plainest.after < gpus // unit).any(axis=0)
        choosing = ways.choosing(plainest.ways, limited, len(others))
        found.append(of_use(ways.all(state, others, choosing)) if choosing.any() else plainest)
    return found


def stages_on(
    problem: Problem, space: Chain, memory_bytes: int | None, most: int, link: Link | None = None
) -> list[Stages]:
    """Return the stages on up to so many GPUs of a kind, which are priced with a link: see `stages_alike`."""
    schedule, microbatches = problem.schedule, problem.microbatches
    limits = replace(problem.limits, memory_bytes=memory_bytes)
    ways = WaysOf(space, limits)
    most = min(most, microbatches) if schedule.divides else most
    parts_s = partial(problem.parts_s, link=link)
    return stages_alike(ways, schedule, microbatches, parts_s, most, problem.cluster.gpus)


def _more_than_before(ways: Ways, after: Integers) -> NDArray[np.bool_]:
    """Return which ways, by replicas, allow more GPUs after the stage than all that recompute less."""
    more = np.ones(after.shape, dtype=bool)
    # Numbers grow from stage to stage, so that the maximum of each begins anew.
    allowed = after + 1 + ways.stage * (int(after.max(initial=0)) + 2)
    for sharded in (False, True):
        rows = np.flatnonzero(ways.sharded == sharded)
        most = np.maximum.accumulate(allowed[:, rows], axis=1)
        more[:, rows[1:]] = most[:, 1:] > most[:, :-1]
    return more
