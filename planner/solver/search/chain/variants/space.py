"""The ways that rules and memory leave to the stages of a space, a row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.candidate import Groups, StageOptions, whole_stage
from planner.cost.recomputation import Choices, Recomputation
from planner.cost.work import Floats, Footprint, Integers, Record, Work
from planner.formats.files import replace
from planner.options.solving import RecomputeRule
from planner.schedule.schedule import Schedule
from planner.solver.problem.problem import Limits
from planner.solver.problem.states import CutSpace
from planner.stages.sharding import UNSHARDED

# of a footprint, which choices decide
KEPT = ("saved_bytes", "working_bytes", "accumulating_bytes")


@dataclass(frozen=True)
class Variants:
    """Ways to run the stages from one state to others, a row each; those of a stage stand
    together.
    """

    source: StageVariants
    state: int
    ends: Integers  # at which each row's stage ends
    stage: Integers  # its place among those that were asked for
    sharded: NDArray[np.bool_]
    # of recomputing layers, by its number for the stage; 0 for what the rule says of all stages
    choice: Integers
    work: Work
    footprint: Footprint  # of a replica that has the whole state of the optimizer

    def __len__(self) -> int:
        return len(self.stage)

    def __getitem__(self, rows: Integers) -> Variants:
        return replace(
            self,
            ends=self.ends[rows],
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
        """Return the most microbatches that may be in flight, by replicas (a column) and row.

        Memory limits them, and what the gradients may be stale by.
        """
        limits = self.source.limits
        most: Integers = np.full((len(replicas), len(self)), limits.deepest)
        if limits.memory_bytes is None:
            return most

        footprint = self.footprint_on(replicas).divided(microbatches)
        fit = footprint.most_in_flight(
            limits.memory_bytes, schedule.stashes, schedule.weight_versions
        )
        return np.asarray(np.minimum(most, fit))

    def options(self, row: int, replicas: int) -> StageOptions:
        """Return a row as the options of a stage."""
        groups = self.source.groups(self.state, int(self.ends[row]), int(self.choice[row]))
        options = StageOptions(replicas, recompute=groups)
        if self.sharded[row]:
            return options.with_sharding(UNSHARDED.of_optimizer_alone())
        return options


class VariantTable(Protocol):
    """What is known of some ways, a column each."""

    @property
    def variants(self) -> Variants:
        """The ways."""

    def limited(self, gpus: int) -> NDArray[np.bool_]:
        """Return which ways do not allow so many GPUs after the stage on some replicas."""


Table = TypeVar("Table", bound=VariantTable)


class StageVariants:
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

    def plainest_footprint(self, state: int, ends: Integers, work: Work) -> Footprint:
        """Return the footprint of stages that recompute only what the rule says of all stages."""
        footprint = self.space.footprint(state, ends, work)
        if self.rule == "always":
            return footprint.recomputed()
        if self.rule == "blocks":
            choices = self._choices.of(state, ends.tolist())
            return replace(footprint, **columns_of(choices, KEPT))
        return footprint

    def table(
        self,
        state: int,
        ends: Integers,
        tabulate: Callable[[Variants], Table],
        gpus: int,
    ) -> Table:
        """Return a table of the stages from a state: in their plainest way, and in all ways where
        that does not allow so many GPUs after the stage.
        """
        plainest = tabulate(self.all(state, ends))
        variants = plainest.variants
        free = variants.stage[~plainest.limited(gpus) & ~variants.sharded]
        choosing = ~np.isin(np.arange(len(ends)), free)
        if not (self.chooses and choosing.any()):
            return plainest
        return tabulate(self.all(state, ends, choosing))

    def all(
        self, state: int, ends: Integers, choosing: NDArray[np.bool_] | None = None
    ) -> Variants:
        """Return all ways to run the stages from the state to each end; only those `choosing`
        may choose.
        """
        # 1. Each stage has a row for its plainest way.
        variants = self.plainest(state, ends)

        # 2. Stages that choose have a row for each choice of recomputing layers; the first
        # recomputes nothing.
        if self.chooses and choosing is not None and choosing.any():
            variants = self._with_choices(variants, choosing)

        # 3. Where replicas may shard the optimizer's state, each row comes twice.
        if self.shards:
            row, sharded = numbered(np.full(len(variants), 2))
            variants = variants[row]
            variants = replace(
                variants, sharded=sharded > 0, work=variants.work.shared_out(sharded > 0)
            )

        return variants

    def plainest(self, state: int, ends: Integers) -> Variants:
        """Return the plainest way to run each stage."""
        work = self.space.work(state, ends)
        return Variants(
            source=self,
            state=state,
            ends=ends,
            stage=np.arange(len(ends)),
            sharded=np.zeros(len(ends), dtype=bool),
            choice=np.zeros(len(ends), dtype=np.int64),
            work=self.plainest_work(work),
            footprint=self.plainest_footprint(state, ends, work),
        )

    def _with_choices(self, plainest: Variants, choosing: NDArray[np.bool_]) -> Variants:
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
            choices = self._choices.of(plainest.state, plainest.ends[choosing].tolist())
            counts[choosing] = [len(each) for each in choices]
            kept = columns_of(choices, (*KEPT, "recompute_s"), first=1)
            recompute_s = kept.pop("recompute_s")

        stage, choice = numbered(counts)
        variants = plainest[stage]
        return replace(
            variants,
            choice=choice,
            work=with_columns(variants.work, choice > 0, {"recompute_s": recompute_s}),
            footprint=with_columns(variants.footprint, choice > 0, kept),
        )

    def groups(self, state: int, end: int, choice: int) -> Groups:
        """Return the groups of layers that recompute under a choice of a stage."""
        if self.rule == "blocks" or (choice > 0 and not self.whole_stages):
            (choices,) = self._choices.of(state, [end])
            return choices.groups(choice)
        return whole_stage(self.space.layers(state, end), self.recomputes or choice > 0)


class StageChoices:
    """The choices under one rule. Many searches ask for them, so the layers' costs remember
    them.
    """

    def __init__(self, space: CutSpace, rule: RecomputeRule) -> None:
        self._space = space
        self._known = space.layer_costs.memo.table(
            (StageChoices, rule), lambda: _Known(Recomputation(space.layer_costs, rule))
        )

    def of(self, state: int, ends: Iterable[int]) -> list[Choices]:
        """Return the choices of the stages from the state to each end; a stage's first
        recomputes least.
        """
        spans = [self._space.span(state, end) for end in ends]
        return self._known.of(spans)


class _Known:
    """The choices of what recomputes, by the layers of a stage."""

    def __init__(self, recomputation: Recomputation) -> None:
        self._recomputation = recomputation
        self._choices: dict[Sequence[int], Choices] = {}

    def of(self, spans: Sequence[Sequence[int]]) -> list[Choices]:
        new = [*dict.fromkeys(span for span in spans if span not in self._choices)]
        if new:
            found = self._recomputation.several([tuple(span) for span in new])
            self._choices.update(zip(new, found, strict=True))

        return [self._choices[span] for span in spans]


def columns_of(choices: list[Choices], names: Iterable[str], first: int = 0) -> dict[str, Floats]:
    """Return columns of all choices of stages one after the other, from the `first` of each stage
    on.
    """
    return {
        name: np.concatenate([getattr(each, name)[first:] for each in choices]) for name in names
    }


def taken(
    record: Record, rows: Integers | NDArray[np.bool_] | slice | tuple[Integers, ...]
) -> Record:
    """Return some rows of work or footprints, or entries of matrices; what has none is the same for
    all.
    """
    columns = {}
    for field in fields(record):
        column = np.asarray(getattr(record, field.name))
        columns[field.name] = column[rows] if column.ndim else column

    return type(record)(**columns)


def with_columns(
    record: Record, rows: NDArray[np.bool_], columns: Mapping[str, ArrayLike]
) -> Record:
    """Return the record with other values in some rows of the named columns."""
    changed = {}
    for name, values in columns.items():
        column = np.broadcast_to(getattr(record, name), rows.shape).copy()
        column[rows] = values
        changed[name] = column

    return replace(record, **changed)


def numbered(counts: Integers) -> tuple[Integers, Integers]:
    """Return a row for each member of groups of so many: its group, and its number in the group
    from 0.
    """
    group = np.repeat(np.arange(len(counts)), counts)
    begin = np.cumsum(counts) - counts
    return group, np.arange(len(group)) - begin[group]
