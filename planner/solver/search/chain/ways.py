"""The ways to run stages: whether the optimizer's state is sharded, and which layers recompute.

Searches ask for many stages at once, and every way of every stage is a row. For a stage on given replicas with a given
number of units in flight, the least extra time whose memory fits is that of the fastest row that fits: the rows of a
stage hold every choice of recomputing layers that some memory limit could make the best one
(`planner.cost.recomputation`). `BestWays` picks the row for each stage of a plan whose cuts and replicas are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.candidate import Groups, StageOptions, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.recomputation import Choices, Recomputation
from planner.cost.work import Floats, Footprint, Integers, Record, Work
from planner.options.solving import UNLIMITED, RecomputeRule
from planner.schedule.schedule import Schedule
from planner.solver.problem.bounds import balanced_s
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.states import StateSpace


@dataclass(frozen=True)
class BestWays:
    """The best ways to run the stages of plans for one problem over one space.

    Attributes:
        problem: with the memory.
        space: of the stages.
        deeper: times the published depths that stages have room for.
    """

    problem: Problem
    space: StateSpace
    deeper: float = 1.0

    @cached_property
    def _known(self) -> dict[tuple[int, int, int, int], StageOptions]:
        """Options that were found before: local search asks for the same stages again and again."""
        return {}

    @cached_property
    def _ways(self) -> WaysOf:
        return WaysOf(self.space, self.problem.limits, prices_shards=self.problem.simulates)

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

    def _best(self, ways: Ways, replicas: int, after: int) -> int | None:
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
    """Ways to run the stages from one state to others, a row each; those of a stage stand together.

    Attributes:
        source: which they come from.
        state: at which the stages begin.
        others: at which each row's stage ends.
        stage: place of each row's stage among those that were asked for.
        sharded: whether the replicas divide the optimizer's state.
        choice: of recomputing layers, by its number for the stage; 0 for what the rule says of all stages.
        work: for one microbatch.
        footprint: of a replica that has the whole state of the optimizer.
    """

    source: WaysOf
    state: int
    others: Integers
    stage: Integers
    sharded: NDArray[np.bool_]
    choice: Integers
    work: Work
    footprint: Footprint

    def __len__(self) -> int:
        return len(self.stage)

    def __getitem__(self, rows: Integers) -> Ways:
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
        return StageOptions(replicas, bool(self.sharded[row]), groups)


class WaysOf:
    """The ways that rules and memory leave to the stages of a space.

    Args:
        space: of the stages.
        limits: with the rules.
        prices_shards: whether the cost model knows sharded stages.

    Attributes:
        shards: whether stages may be sharded.
        always_shards: whether all stages with replicas must be.
        rule: which layers may recompute.
        whole_stages: whether the choice is between all layers of a stage and none.
        most_sharded: replicas of such a stage.
        recomputes: whether all stages recompute.
        chooses: whether stages may choose what to recompute, because memory is limited.
    """

    def __init__(self, space: StateSpace, limits: Limits, *, prices_shards: bool = True) -> None:
        self.space, self.limits, rules = space, limits, limits.rules
        self.layer_costs = space.layer_costs
        self.rule = rules.recompute
        self.whole_stages = limits.whole_stages and self.rule == "auto"
        profile, rule = space.layer_costs.profile, rules.shard_optimizer
        limited = limits.memory_bytes is not None
        gains = limited or any(layer.update_s > 0 for layer in profile.layers)
        possible = prices_shards and profile.may_shard_optimizer and limits.gpus > 1
        self.most_sharded = limits.most_sharded
        self.always_shards = possible and rule == "always"
        self.shards = self.always_shards or (possible and rule == "auto" and gains)
        self.recomputes = self.rule in ("always", "blocks")
        self.chooses = limited and self.rule == "auto"
        self._by_layers = []
        for each in space.sizes:
            known = _KNOWN.setdefault(each.layer_costs, {})
            self._by_layers.append(known.setdefault(self.rule, (each.recomputation(self.rule), {})))
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
        missing = [other for other in others if (state, other) not in self._known]
        for number, (recomputation, by_layers) in enumerate(self._by_layers):
            layers = {other: self.space.layers(state, other) for other in missing if other // len(self.space) == number}
            if new := [*{each: None for each in layers.values() if each not in by_layers}]:
                by_layers.update(zip(new, recomputation.several(new), strict=True))
            self._known.update({(state, other): by_layers[each] for other, each in layers.items()})
        return [self._known[state, other] for other in others]


def relaxed_s(problem: Problem, space: StateSpace) -> float:
    """Return seconds that no plan is below, whatever its cuts: perfect balance, no communication, the leanest ways."""
    ways = WaysOf(space, problem.limits, prices_shards=problem.simulates)
    return balanced_s(problem.layer_costs, problem.setting, ways.least)


def most_after(schedule: Schedule, microbatches: int, replicas: Integers, most: Integers, gpus: int) -> Integers:
    """Return how many of the GPUs may follow stages with room for `most` units in flight; -1 if not even none may.

    1 + ceil(after / replicas) units are in flight, or fewer where the schedule has another limit.
    """
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
    """Return a column of the choices of several stages, one stage after the other, without the first ones of each."""
    return np.concatenate([getattr(each, name)[first:] for each in choices])


def _set(record: Record, where: NDArray[np.bool_], columns: dict[str, Floats]) -> Record:
    """Return work or footprints with some columns replaced in some rows."""
    replaced = {}
    for name, values in columns.items():
        replaced[name] = np.array(np.broadcast_to(getattr(record, name), where.shape))
        replaced[name][where] = values
    return replace(record, **replaced)
