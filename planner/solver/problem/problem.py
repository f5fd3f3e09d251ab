"""The problem that the solver solves, as one record that every search takes.

`Limits` say what a plan may use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link, link_of
from planner.cost.network.topology import Topology, places_matter
from planner.cost.overheads import NO_RESERVE, Price, Reserve
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.work import Floats, Work
from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.files import replace
from planner.formats.profile import Profile
from planner.options.solving import UNLIMITED, DepthRule, RecomputeRule, SolverName, StageRules
from planner.plan.rank_groups import groups_of
from planner.schedule.schedule import Schedule
from planner.solver.clock import NO_LIMIT, Clock
from planner.solver.problem.budget import Budget
from planner.solver.problem.replica_models import ReplicaModel, replica_model
from planner.solver.problem.result import Evaluation
from planner.solver.problem.states import CutSpace
from planner.solver.tuning.record import STANDARD, Tuning
from planner.stages.replicas import most_replicas
from planner.stages.sharding import PossibleSharding, Sharding, why_whole
from planner.stages.tensor import any_divided, one_degree
from planner.units import SLACK

Path = TypeVar("Path", bound=Sized)  # as long as it has stages


@dataclass(frozen=True)
class Limits:
    """What the plans of one search may use, and when the search ends."""

    gpus: int
    memory_bytes: int | None = None  # of each GPU
    rules: StageRules = field(default_factory=StageRules)
    clock: Clock = NO_LIMIT  # when it passes, the best plan so far is the answer
    # the most units in flight that a stage may have, for its gradients' sake
    deepest: int = UNLIMITED
    most_sharded: int = UNLIMITED  # replicas of a sharded stage, none of which may idle
    most_replicas: int = UNLIMITED
    # whether stages that may choose recompute all of their layers at once, or none
    whole_stages: bool = False
    tuning: Tuning = STANDARD  # of the question

    @property
    def counts_gpus(self) -> bool:
        """Whether the GPUs after a stage decide whether it may be: they are in flight, or late, by
        them.
        """
        return self.memory_bytes is not None or self.deepest < UNLIMITED

    @property
    def recomputes(self) -> bool:
        """Whether all stages recompute, by the rule."""
        return self.rules.recompute in ("always", "blocks")

    def may_shard(self, profile: Profile) -> bool:
        """Return whether stages may shard the optimizer's state, which saves memory and the time of
        the optimizer's step.
        """
        rule = self.rules.shard_optimizer
        if rule == "never" or self.gpus == 1 or not profile.may_shard_optimizer:
            return False
        if rule == "always" or self.memory_bytes is not None:
            return True
        return any(layer.update_s > 0 for layer in profile.layers)

    def least(self, work: Work, profile: Profile) -> Work:
        """Return work that no way to run stages is below."""
        if self.recomputes:
            work = work.recomputed()
        if self.may_shard(profile):
            work = replace(work, update_s=work.update_s / self.gpus)
        return work

    def allows_stages(self, count: int) -> bool:
        """Return whether a plan may have so many stages."""
        return self.rules.max_stages is None or count <= self.rules.max_stages

    def of_few_stages(
        self,
        walk: Callable[[int | None], Path | None],
        space: CutSpace,
        gpus: int,
    ) -> Path | None:
        """Return the best plan of a walk that keeps the rule for the number of stages.

        Args:
            walk: returns the best plan over the space, of any number of stages or at most so many,
                which takes a table for each number; None without a plan.
            space: of the walk.
            gpus: of the walk.
        """
        path = walk(None)
        if path is None or self.allows_stages(len(path)):
            return path
        return walk(self.most_stages(space, gpus))

    def most_stages(self, space: CutSpace, gpus: int) -> int:
        """Return how many stages a plan over the space has at most."""
        most = min(gpus, len(space) - 1)
        if self.rules.max_stages is None:
            return most
        return min(most, self.rules.max_stages)


@dataclass(frozen=True)
class Problem:
    """A model, what its plan is priced for, what the plan must respect, and what the search may
    spend.
    """

    layer_costs: LayerCosts
    setting: Setting
    rules: StageRules = field(default_factory=StageRules)
    depth: DepthRule = "auto"
    # of all searches for one plan and its variants
    budget: Budget = field(default_factory=Budget, compare=False)
    # seconds from which on a plan is of no use, because another one is faster
    hopeless_s: float = math.inf
    # how much faster, relatively, other plans may be than the answer of a search
    precision: float = 0.0
    reserve: Reserve = NO_RESERVE  # what was taken off the cluster's memory before: `with_room`
    most_replicas: int = UNLIMITED  # that a stage may have
    degree: int = 1  # ranks of each group, where what counts as a GPU is a group of ranks
    solver: SolverName = "auto"
    tuning: Tuning = STANDARD  # how far searches look, how long, and how near counts as equal

    @property
    def recompute(self) -> RecomputeRule:
        return self.rules.recompute

    @property
    def cluster(self) -> Cluster:
        return self.setting.cluster

    @property
    def schedule(self) -> Schedule:
        return self.setting.schedule

    @property
    def microbatches(self) -> int:
        return self.setting.microbatches

    @property
    def clock(self) -> Clock:
        """When searches end; the budget's own clock leaves time to simulate what they found."""
        return self.budget.searching

    @property
    def limits(self) -> Limits:
        """What plans may use on the cluster, whose GPUs are alike."""
        return Limits(
            self.cluster.gpus,
            self.cluster.memory_bytes,
            self.rules,
            self.clock,
            self.rules.deepest(self.schedule),
            self.microbatches if self.schedule.divides else UNLIMITED,
            self.most_replicas,
            tuning=self.tuning,
        )

    def most_replicas_on(self, gpus: int) -> int:
        """Return the most replicas that a stage may have on so many GPUs."""
        return min(self.most_replicas, most_replicas(self.schedule, self.microbatches, gpus))

    def allows(self, plan: Evaluation) -> bool:
        """Return whether a plan fits the memory, its versions suffice, no sharded replica idles,
        and so on.
        """
        stages = zip(plan.stages, plan.price.in_flight, strict=True)
        return (
            all(self._allows_stage(stage.options, depth) for stage, depth in stages)
            and self.limits.allows_stages(len(plan.stages))
            and plan.fits(self.cluster)
        )

    def runs_versions(self, plan: Evaluation) -> bool:
        """Return whether each stage has the versions of its weights that its schedule needs."""
        return all(
            self.schedule.versions_suffice(self.microbatches, stage.replicas, depth)
            for stage, depth in zip(plan.stages, plan.price.in_flight, strict=True)
        )

    def _allows_stage(self, options: StageOptions, in_flight: int) -> bool:
        """Return whether a stage may have its replicas, with so many microbatches in flight."""
        replicas = options.replicas
        most_updates = self.rules.max_staleness
        if most_updates is not None and self.schedule.staleness(in_flight) > most_updates:
            return False
        if replicas > self.most_replicas:
            return False
        if options.shards_optimizer and replicas > self.limits.most_sharded:
            return False
        if options.shards_gradients and self.microbatches % replicas > 0:
            return False
        return self.schedule.versions_suffice(self.microbatches, replicas, in_flight)

    def comparable_s(self, plan: Evaluation) -> float:
        """Return the seconds by which plans are compared: one that was not simulated counts as if
        it waited.
        """
        if plan.simulated:
            return plan.seconds
        return plan.seconds * (1 + self.tuning.evaluate.assumed_waiting_share)

    def is_faster(self, plan: Evaluation, other: Evaluation, share: float = SLACK) -> bool:
        """Return whether a plan takes less time than another, by this share of it, as far as is
        known.
        """
        return self.comparable_s(plan) < self.comparable_s(other) * (1 - share)

    @property
    def sharding(self) -> PossibleSharding:
        """What replicas may divide in the plans of searches."""
        # Without a limit of memory, dividing the optimizer's state alone is as fast, except between
        # groups that repeat each other on slower links.
        return self._possible_sharding(fully=self.cluster.has_memory_limit)

    @property
    def allowed_sharding(self) -> PossibleSharding:
        """What replicas may divide in any plan."""
        return self._possible_sharding(fully=True)

    def _possible_sharding(self, *, fully: bool) -> PossibleSharding:
        """Return what replicas may divide, where they may divide weights `fully` or not at all."""
        profile = self.layer_costs.profile
        rule = self.rules.shard_optimizer
        possible = rule != "never" and profile.may_shard_optimizer
        runs = not (profile.compiled or profile.memory_format)
        if self.degree > 1:
            # Groups of ranks that divide layers are trained elsewhere so, and not here. A measured
            # profile is there to be trained with.
            runs = profile.provenance.source == "estimated"

        divides = fully and runs and why_whole(self.schedule, 2, [2]) is None
        return PossibleSharding(
            always=rule == "always",
            optimizer=possible,
            gradients=possible and divides,
            groups=self.server_sizes,
        )

    def shardings(self, replicas: int, stages: int = 1) -> Iterator[Sharding]:
        """Yield what the replicas of each of so many equal stages may divide."""
        even = self.microbatches % replicas == 0
        yield from self.sharding.of_replicas(replicas, whole=stages == 1 and even)

    @cached_property
    def server_sizes(self) -> tuple[int, ...]:
        """How many GPUs share the links inside a server, a rack, and so on, below the whole
        cluster; of one kind.
        """
        if self.cluster.kinds:
            return ()
        return tuple(int(size) for size in self.topology.groups[:-1])

    @property
    def placed(self) -> bool:
        """Whether the search knows places, and the cluster has several levels for which they
        matter.
        """
        return places_matter(self.cluster) and self.schedule.placed

    @property
    def link(self) -> Link:
        """The slowest link of the cluster, which prices every message where places do not
        matter.
        """
        return link_of(self.cluster)

    @cached_property
    def topology(self) -> Topology:
        return Topology(self.cluster)

    @property
    def kinds(self) -> tuple[DeviceKind | None, ...]:
        """The kinds of GPUs; only None, for the profiled one, where all are alike."""
        return self.cluster.kinds or (None,)

    def count(self, kind: DeviceKind | None) -> int:
        """Return the number of GPUs of that kind."""
        if kind is None:
            return self.cluster.gpus
        return kind.count

    def asynchronous(self, link: Link | None = None) -> ReplicaModel:
        """Return the cost model of a stage, with its bounds, for the cluster's slowest or another
        link.
        """
        return replica_model(link or self.link, self.schedule, self.microbatches)

    def synchronous(self, link: Link | None = None) -> SynchronousModel:
        """Return the cost model of a stage under a synchronous schedule, for the cluster's slowest
        or another link.
        """
        return SynchronousModel(link or self.link, self.schedule, self.microbatches)

    def parts_s(
        self, work: Work, replicas: ArrayLike, link: Link | None = None
    ) -> tuple[Floats, Floats]:
        """Return stages' parts of the sum over all stages and of the maximum over them, which make
        a plan's seconds.
        """
        if self.schedule.asynchronous:
            return np.asarray(0.0), self.asynchronous(link).stage_s(work, replicas)
        model = self.synchronous(link)
        return model.sum_s(work), model.max_s(work, replicas)

    def price(self, stages: Sequence[Candidate]) -> Price:
        """Price a plan by the cost model."""
        within, groups, degree = self.in_groups(stages)
        priced = price(within.layer_costs, groups, within.setting)
        return replace(priced, communication_bytes=priced.communication_bytes * degree)

    def in_groups(self, stages: Sequence[Candidate]) -> tuple[Problem, Sequence[Candidate], int]:
        """Return a plan as one of the cluster's groups of ranks, with their size, where all stages
        have one size.
        """
        degree = one_degree(stage.options for stage in stages)
        if degree is None or not any_divided(stage.options for stage in stages):
            return self, stages, 1

        groups = [replace(stage, options=replace(stage.options, tensor=1)) for stage in stages]
        return self.on_groups_of(degree), groups, degree

    def with_profile(self, profile: Profile) -> Problem:
        return replace(self, layer_costs=self.layer_costs.with_profile(profile))

    def with_cluster(self, cluster: Cluster) -> Problem:
        return replace(self, setting=replace(self.setting, cluster=cluster))

    def on_groups_of(self, degree: int) -> Problem:
        """Return the problem on groups of so many ranks, which divide all layers between them."""
        if degree == 1:
            return self
        on_groups = self.with_cluster(groups_of(self.cluster, degree))
        return replace(on_groups, layer_costs=self.layer_costs.at_degree(degree), degree=degree)

    def with_schedule(self, schedule: Schedule, microbatches: int | None = None) -> Problem:
        """Return the problem under another schedule, with one stage per worker."""
        many = microbatches or self.microbatches
        return replace(
            self, setting=replace(self.setting, schedule=schedule, microbatches=many, chunks=1)
        )

    def with_room(self, communicators: int) -> Problem:
        """Return the problem on tensors alone, with the memory that so many communicators of each
        device leave.

        Searches count the communicators that a stage has in any plan among its buffers; these come
        on top.
        """
        overheads = self.layer_costs.overheads
        assert overheads is not None, "the devices have overheads"
        reserve = overheads.reserve(communicators)
        less = self.with_cluster(self.cluster.with_memory(reserve.room))
        return replace(less, layer_costs=self.layer_costs.of_tensors, reserve=reserve)
