"""Choose schedule and microbatch size: solve for each at the same minibatch, and take the fastest plan per sample.

Every schedule that divides minibatches gets the same number of samples per minibatch, whatever the microbatch size.
1f1b does not divide, so its minibatch is what the profile measured. How well a model trains per sample is not compared:
asynchronous schedules use older weights (under 1f1b as many updates old as the pipeline is deep, under 2bw one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import InfeasibleError, InputError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.schedule.defaults import CHUNKS, MICROBATCHES_PER_GPU
from planner.schedule.flush import FLUSH
from planner.schedule.registry import SCHEDULES, find
from planner.schedule.schedule import Schedule
from planner.solver import solve
from planner.solver.candidates.budget import Patience
from planner.solver.minibatch import microbatches_in
from planner.solver.problem import DepthRule
from planner.solver.stage_rules import StageRules

COMPARED: tuple[Schedule, ...] = tuple(schedule for schedule in SCHEDULES if schedule.pipelined)


@dataclass(frozen=True)
class Option:
    """One schedule at one microbatch size.

    Attributes:
        schedule: that was solved for.
        profile: the costs at the microbatch size.
        microbatches: per minibatch.
        plan: the best one, or None if there is none.
        obstacle: why there is no plan.
    """

    schedule: Schedule
    profile: Profile
    microbatches: int
    plan: Plan | None
    obstacle: PlannerError | None

    @property
    def seconds_per_sample(self) -> float:
        """Seconds per sample of the plan; per microbatch if the profile does not know its size."""
        assert self.plan is not None
        return self.plan.predicted.seconds_per_minibatch / self.samples_per_minibatch

    @property
    def samples_per_minibatch(self) -> int:
        """Samples per minibatch; microbatches if the profile does not know their size."""
        return self.microbatches * (self.profile.microbatch_size or 1)

    @property
    def samples_per_update(self) -> int:
        """The most samples that a stage averages over: under 1f1b, a round of its replicas; else a minibatch."""
        assert self.plan is not None
        rounds = max(self.plan.replicas) if self.schedule.stashes else 1
        return self.samples_per_minibatch * rounds

    @property
    def idle_share(self) -> float:
        """Share of time in which the plan's GPUs do not compute: bubbles, messages and uneven work."""
        assert self.plan is not None
        busy_s = sum(map(self.plan.computing_s, self.plan.stages))
        return max(0.0, 1 - busy_s / (self.plan.workers * self.plan.predicted.seconds_per_minibatch))

    @property
    def memory_bytes(self) -> int:
        """Memory of the GPU that holds most."""
        assert self.plan is not None
        return max(self.plan.memory_bytes(stage) for stage in range(len(self.plan.stages)))


@dataclass(frozen=True)
class Choice:
    """The fastest plan, and all options that were solved for."""

    best: Option
    options: tuple[Option, ...]

    @property
    def plan(self) -> Plan:
        """The chosen plan."""
        assert self.best.plan is not None
        return self.best.plan


def choose(
    profiles: Sequence[Profile],
    cluster: Cluster,
    *,
    schedules: Sequence[Schedule | str] = COMPARED,
    microbatches: int | None = None,
    minibatch: int | None = None,
    depth: DepthRule = "auto",
    rules: StageRules | None = None,
    chunks: int = CHUNKS,
    accept_divided_loss: bool = False,
    patience: Patience | None = None,
) -> Choice:
    """Find the plan with most samples per second over all schedules and profiles.

    Args:
        profiles: of one model, at different microbatch sizes.
        cluster: devices, memory and links.
        schedules: what to compare.
        microbatches: per minibatch, at the smallest of the profiles' sizes; by default 4 per GPU. Larger microbatches
            make the same minibatch.
        minibatch: samples of every minibatch, in place of `microbatches`; what cannot make it is no candidate.
        depth: as for `solve`.
        rules: what the stages of all plans may be like.
        chunks: as for `solve`.
        accept_divided_loss: as for `solve`.
        patience: how long to search for all plans together.

    Raises:
        InfeasibleError: if nothing fits the memory.
        InputError: for profiles of different models, or sizes that cannot make the same minibatch.
    """
    _check_alike(profiles)
    if microbatches is not None and minibatch is not None:
        raise InputError("`microbatches` and `minibatch` say the same twice", hint="leave out one of them")
    patience, rules = patience or Patience(), rules or StageRules()
    options = list[Option]()
    for profile in sorted(profiles, key=lambda each: each.microbatch_size or 0):
        many = _microbatches(profile, profiles, cluster, microbatches) if minibatch is None else 1
        for schedule in map(find, schedules):
            count = many if schedule.divides else 1
            try:
                count = count if minibatch is None else microbatches_in(minibatch, profile, schedule)
                plan = solve(
                    profile,
                    cluster,
                    schedule=schedule,
                    microbatches=count,
                    depth=depth,
                    recompute=rules.recompute,
                    shard_optimizer=rules.shard_optimizer,
                    max_stages=rules.max_stages,
                    max_staleness=rules.max_staleness,
                    granularity=rules.granularity,
                    tensor=rules.tensor,
                    chunks=chunks,
                    accept_divided_loss=accept_divided_loss,
                    time_limit_s=patience.part(1 / (len(profiles) * len(schedules) - len(options))).deadline.left_s,
                    progress=patience.progress,
                )
            except (InfeasibleError, InputError) as error:
                options.append(Option(schedule, profile, count, None, error))
            else:
                options.append(Option(schedule, profile, count, plan, None))
    eligible = [option for option in options if option.plan is not None]
    if not eligible:
        raise _least_demanding(options).obstacle or InfeasibleError("no schedule has a plan")
    # The first of equals wins: smaller microbatches before larger ones, schedules in the order given.
    return Choice(min(eligible, key=lambda option: option.seconds_per_sample), tuple(options))


def _least_demanding(options: Sequence[Option]) -> Option:
    """Return the option whose obstacle to report: that of 1f1b-flush, which holds least."""
    return min(options, key=lambda option: option.schedule is not FLUSH)


def _check_alike(profiles: Sequence[Profile]) -> None:
    first = profiles[0]
    sizes = [profile.microbatch_size for profile in profiles]
    for profile in profiles[1:]:
        if (profile.model, profile.graph_hash) != (first.model, first.graph_hash):
            raise InputError(
                f"the profiles are of different models, '{first.model}' and '{profile.model}'",
                hint="give profiles of one model at several batch sizes",
            )
        if None in sizes:
            raise InputError(
                f"a profile of '{profile.model}' does not know its batch size, so that it cannot be compared",
                hint="give one profile, or profiles made with `batch_size`",
            )
    for size in sizes:
        if len(profiles) > 1 and sizes.count(size) > 1:
            raise InputError(f"two profiles have the batch size {size}", hint="give one profile per batch size")


def _microbatches(profile: Profile, profiles: Sequence[Profile], cluster: Cluster, asked: int | None) -> int:
    """Return how many microbatches make the same minibatch as with every other profile."""
    smallest = min(each.microbatch_size or 1 for each in profiles)
    samples = (asked or MICROBATCHES_PER_GPU * cluster.gpus) * smallest
    size = profile.microbatch_size or 1
    if samples % size:
        raise InputError(
            f"a minibatch of {samples} samples cannot be divided into microbatches of {size}",
            hint=f"give `microbatches` for microbatches of {smallest} so that all batch sizes divide the minibatch",
        )
    return samples // size
