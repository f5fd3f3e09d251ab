"""The ways that rules and memory leave to the stages of a space, a row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.candidate import Groups, StageOptions, whole_stage
from planner.cost.work import Footprint, Integers, Work
from planner.schedule.schedule import Schedule
from planner.solver.problem.problem import Limits
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.ways.choices import KEPT, StageChoices, columns_of
from planner.solver.search.chain.ways.rows import numbered, taken, with_columns
from planner.stages.sharding import UNSHARDED


@dataclass(frozen=True)
class Ways:
    """Ways to run the stages from one state to others, a row each; those of a stage stand
    together.
    """

    source: WaysOf
    state: int
    others: Integers  # at which each row's stage ends
    stage: Integers  # its place among those that were asked for
    sharded: NDArray[np.bool_]
    # of recomputing layers, by its number for the stage; 0 for what the rule says of all stages
    choice: Integers
    work: Work
    footprint: Footprint  # of a replica that has the whole state of the optimizer

    def __len__(self) -> int:
        return len(self.stage)

    def __getitem__(self, rows: Integers) -> Ways:
        return replace(
            self,
            others=self.others[rows],
            stage=self.stage[rows],
            sharded=self.sharded[rows],
            choice=self.choice[rows],
            work=taken(self.work, rows),
            footprint=taken(self.footprint, rows),
        )

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
        if not self.sharded.any():
            return footprint
        return footprint.shared_out(np.where(self.sharded, replicas, 1))

    def fit(
        self,
        replicas: ArrayLike,
        in_flight: ArrayLike,
        schedule: Schedule,
        microbatches: int,
    ) -> NDArray[np.bool_]:
        """Return which rows fit the memory on so many replicas, with so many microbatches in
        flight.
        """
        memory_bytes = self.source.limits.memory_bytes
        if memory_bytes is None:
            return np.ones(len(self), dtype=bool)
        footprint = self.footprint_on(replicas).divided(microbatches)
        held = footprint.total_bytes(in_flight, schedule.versions(np.asarray(in_flight)))
        return np.asarray(held <= memory_bytes)

    def most_in_flight(self, replicas: Integers, schedule: Schedule, microbatches: int) -> Integers:
        """Return the most microbatches that may be in flight, by memory and for the gradients' sake;
        by replicas, a column, and row.
        """
        limits = self.source.limits
        most = np.full((len(replicas), len(self)), limits.deepest)
        if limits.memory_bytes is None:
            return most
        footprint = self.footprint_on(replicas).divided(microbatches)
        fit = footprint.most_in_flight(
            limits.memory_bytes, schedule.stashes, schedule.weight_versions
        )
        return np.minimum(most, fit)

    def options(self, row: int, replicas: int) -> StageOptions:
        """Return a row as the options of a stage."""
        groups = self.source.groups(self.state, int(self.others[row]), int(self.choice[row]))
        options = StageOptions(replicas, recompute=groups)
        if self.sharded[row]:
            return options.with_sharding(UNSHARDED.of_optimizer_alone())
        return options


class TableOfWays(Protocol):
    """What is known of some ways, a column each."""

    @property
    def ways(self) -> Ways:
        """The ways."""

    def limited(self, gpus: int) -> NDArray[np.bool_]:
        """Return which ways do not allow so many GPUs after the stage on some replicas."""


Table = TypeVar("Table", bound=TableOfWays)


class WaysOf:
    """The ways that rules and memory leave to the stages of a space.

    Attributes:
        whole_stages: whether all layers of a stage recompute, or none.
        always_shards: whether all stages of several replicas shard the optimizer's state.
        shards: whether stages may.
        recomputes: whether all stages recompute.
        chooses: whether stages may choose what to recompute.
    """

    def __init__(self, space: CutSpace, limits: Limits) -> None:
        self.space = space
        self.limits = limits
        self.layer_costs = space.layer_costs
        self.rule = limits.rules.recompute
        self.most_sharded = limits.most_sharded
        self._choices = StageChoices(space, self.rule)

        self.recomputes = limits.recomputes
        self.chooses = limits.memory_bytes is not None and self.rule == "auto"
        self.whole_stages = limits.whole_stages and self.rule == "auto"
        self.shards = limits.may_shard(space.layer_costs.profile)
        self.always_shards = self.shards and limits.rules.shard_optimizer == "always"

    def allowed(self, sharded: NDArray[np.bool_], replicas: ArrayLike) -> NDArray[np.bool_]:
        """Return which stages may run on so many replicas: one has nothing to divide, idle ones get
        no part.
        """
        several = np.asarray(replicas) > 1
        enough = several & (np.asarray(replicas) <= self.most_sharded)
        return np.where(sharded, enough, ~several | (not self.always_shards))

    def plainest_work(self, work: Work) -> Work:
        """Return the work of stages that are not sharded and recompute only what the rule says of
        all stages.
        """
        if self.recomputes:
            return work.recomputed()
        return work

    def plainest_footprint(self, state: int, others: Integers, work: Work) -> Footprint:
        """Return the footprint of stages that recompute only what the rule says of all stages."""
        footprint = self.space.footprint(state, others, work)
        if self.rule == "always":
            return footprint.recomputed()
        if self.rule == "blocks":
            choices = self._choices.of(state, others.tolist())
            return replace(footprint, **columns_of(choices, KEPT))
        return footprint

    def table(
        self,
        state: int,
        others: Integers,
        tabulate: Callable[[Ways], Table],
        gpus: int,
    ) -> Table:
        """Return a table of the stages from a state: in their plainest way, and in all ways where
        that does not allow so many GPUs after the stage.
        """
        plainest = tabulate(self.all(state, others))
        ways = plainest.ways
        free = ways.stage[~plainest.limited(gpus) & ~ways.sharded]
        choosing = ~np.isin(np.arange(len(others)), free)
        if not (self.chooses and choosing.any()):
            return plainest
        return tabulate(self.all(state, others, choosing))

    def all(self, state: int, others: Integers, choosing: NDArray[np.bool_] | None = None) -> Ways:
        """Return all ways to run the stages from the state to each of others; only those `choosing`
        may choose.
        """
        # 1. Each stage has a row for its plainest way.
        ways = self._plainest(state, others)

        # 2. Stages that choose have a row for each choice of recomputing layers; the first
        # recomputes nothing.
        if self.chooses and choosing is not None and choosing.any():
            ways = self._with_choices(ways, choosing)

        # 3. Where replicas may shard the optimizer's state, each row comes twice.
        if self.shards:
            row, sharded = numbered(np.full(len(ways), 2))
            ways = ways[row]
            ways = replace(ways, sharded=sharded > 0, work=ways.work.shared_out(sharded > 0))
        return ways

    def _plainest(self, state: int, others: Integers) -> Ways:
        work = self.space.work(state, others)
        return Ways(
            source=self,
            state=state,
            others=others,
            stage=np.arange(len(others)),
            sharded=np.zeros(len(others), dtype=bool),
            choice=np.zeros(len(others), dtype=np.int64),
            work=self.plainest_work(work),
            footprint=self.plainest_footprint(state, others, work),
        )

    def _with_choices(self, plainest: Ways, choosing: NDArray[np.bool_]) -> Ways:
        """Return the plainest ways, each followed by the stage's choices of layers that
        recompute.
        """
        counts = np.ones(len(plainest), dtype=np.int64)
        if self.whole_stages:
            counts[choosing] = 2
            lean = taken(plainest.footprint, choosing).recomputed()
            kept = {name: getattr(lean, name) for name in KEPT}
            recompute_s = taken(plainest.work, choosing).forward_s
        else:
            choices = self._choices.of(plainest.state, plainest.others[choosing].tolist())
            counts[choosing] = [len(each) for each in choices]
            kept = columns_of(choices, (*KEPT, "recompute_s"), first=1)
            recompute_s = kept.pop("recompute_s")

        stage, choice = numbered(counts)
        ways = plainest[stage]
        return replace(
            ways,
            choice=choice,
            work=with_columns(ways.work, choice > 0, {"recompute_s": recompute_s}),
            footprint=with_columns(ways.footprint, choice > 0, kept),
        )

    def groups(self, state: int, other: int, choice: int) -> Groups:
        """Return the groups of layers that recompute under a choice of a stage."""
        if self.rule == "blocks" or (choice > 0 and not self.whole_stages):
            (choices,) = self._choices.of(state, [other])
            return choices.groups(choice)
        return whole_stage(self.space.layers(state, other), self.recomputes or choice > 0)
