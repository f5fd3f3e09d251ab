"""Choose schedule and microbatch size: solve for each at the same minibatch, and take the fastest plan per sample.

1f1b does not divide minibatches, so its minibatch is what the profile measured. How well a model trains per sample is
not compared: asynchronous schedules use older weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.analysis.compare import SYNCHRONOUS, described_plan
from planner.arguments import checked
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.formats.shown import Shown
from planner.options.solving import SolveOptions
from planner.schedule.instructions import MICROBATCHES_PER_GPU
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import Patience

COMPARED: tuple[Schedule, ...] = tuple(schedule for schedule in SCHEDULES if schedule.pipelined)


@dataclass(frozen=True)
class Option:
    """One schedule at one microbatch size, with the best plan or why there is none."""

    schedule: Schedule
    profile: Profile  # the costs at the microbatch size
    microbatches: int  # per minibatch
    plan: Plan | None
    obstacle: PlannerError | None

    @property
    def samples_per_minibatch(self) -> int:
        """Samples per minibatch; microbatches if the profile does not know their size."""
        return self.microbatches * (self.profile.microbatch_size or 1)

    @property
    def seconds_per_sample(self) -> float:
        """Seconds per sample of the plan; per microbatch if the profile does not know its size."""
        assert self.plan is not None
        return self.plan.predicted.seconds_per_minibatch / self.samples_per_minibatch

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
class Choice(Shown):
    """The fastest plan, and all options that were solved for."""

    best: Option
    options: tuple[Option, ...]

    @property
    def plan(self) -> Plan:
        """The chosen plan."""
        assert self.best.plan is not None
        return self.best.plan


@checked
def choose(
    profiles: Sequence[Profile],
    cluster: Cluster,
    options: SolveOptions | None = None,
    schedules: Sequence[Schedule] = COMPARED,
    patience: Patience | None = None,
) -> Choice:
    """Find the plan with most samples per second over all schedules and profiles.

    Args:
        profiles: of one model, at different microbatch sizes.
        cluster: devices, memory and links.
        options: of all searches. Their `microbatches` are those of the smallest profile; larger microbatches make the
            same minibatch. What cannot make their `minibatch` is no candidate.
        schedules: what to compare.
        patience: how long all searches may take together, in place of the options' time limit.

    Raises:
        InfeasibleError: if nothing fits the memory.
        InputError: for profiles of different models, or sizes that cannot make the same minibatch.
    """
    _check_alike(profiles)
    asked = options or SolveOptions()
    patience = patience or Patience.of(asked.time_limit_s, asked.progress)
    found = list[Option]()
    for profile in sorted(profiles, key=lambda each: each.microbatch_size or 0):
        many = _microbatches(profile, profiles, cluster, asked.microbatches) if asked.minibatch is None else None
        for schedule in schedules:
            count = many if schedule.divides else None
            part = patience.part(1 / (len(profiles) * len(schedules) - len(found)))
            own = replace(asked, schedule=schedule, microbatches=count)
            try:
                count = own.microbatches_on(cluster, profile)
                found.append(Option(schedule, profile, count, find_plan(profile, cluster, own, part), None))
            except (InfeasibleError, InputError) as error:
                found.append(Option(schedule, profile, count or 1, None, error))
    eligible = [option for option in found if option.plan is not None]
    if not eligible:
        # The obstacle of 1f1b-flush, which holds least, says most.
        least = min(found, key=lambda option: option.schedule is not FLUSH)
        raise least.obstacle or InfeasibleError("no schedule has a plan")
    # The first of equals wins: smaller microbatches before larger ones, schedules in the order given.
    return Choice(min(eligible, key=lambda option: option.seconds_per_sample), tuple(found))


def with_best_synchronous(choice: Choice) -> Plan:
    """Return the chosen plan; where it is asynchronous, with the best synchronous one of the same microbatches."""
    plan = choice.plan
    others = [
        option.plan
        for option in choice.options
        if option.plan is not None and option.profile is choice.best.profile and not option.schedule.asynchronous
    ]
    if not plan.schedule.asynchronous or not others:
        return plan
    best = min(others, key=lambda other: other.predicted.seconds_per_minibatch / other.microbatches)
    return plan.model_copy(update={"synchronous": described_plan(SYNCHRONOUS, best)})


def _check_alike(profiles: Sequence[Profile]) -> None:
    first = profiles[0]
    sizes = [profile.microbatch_size for profile in profiles]
    for profile in profiles[1:]:
        if (profile.model, profile.graph_hash) != (first.model, first.graph_hash):
            message = f"the profiles are of different models, '{first.model}' and '{profile.model}'"
            raise InputError(message, hint="give profiles of one model at several batch sizes")
        if None in sizes:
            message = f"a profile of '{profile.model}' does not know its batch size, so that it cannot be compared"
            raise InputError(message, hint="give one profile, or profiles made with `batch_size`")
    if twice := next((size for size in sizes if len(sizes) > 1 and sizes.count(size) > 1), None):
        raise InputError(f"two profiles have the batch size {twice}", hint="give one profile per batch size")


def _microbatches(profile: Profile, profiles: Sequence[Profile], cluster: Cluster, asked: int | None) -> int:
    """Return how many microbatches make the same minibatch as with every other profile."""
    smallest = min(each.microbatch_size or 1 for each in profiles)
    samples = (asked or MICROBATCHES_PER_GPU * cluster.gpus) * smallest
    size = profile.microbatch_size or 1
    if samples % size:
        hint = f"give `microbatches` for microbatches of {smallest} so that all batch sizes divide the minibatch"
        raise InputError(f"a minibatch of {samples} samples cannot be divided into microbatches of {size}", hint=hint)
    return samples // size
