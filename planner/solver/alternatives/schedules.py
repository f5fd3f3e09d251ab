"""Plans under several schedules: the fastest of all, and the best synchronous plan beside an asynchronous one."""

from collections.abc import Sequence
from dataclasses import replace

from planner.errors import PlannerError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule
from planner.solver.alternatives.interleaved import or_interleaved
from planner.solver.alternatives.table import LEAST_S, described_plan, seconds_per_microbatch
from planner.solver.clock import Clock
from planner.solver.find_plan import ALIKE, find_plan
from planner.solver.problem.budget import LATER
from planner.stages.replicas import update_words

SYNCHRONOUS = "best synchronous plan"


def under_every_schedule(
    profile: Profile,
    cluster: Cluster,
    options: SolveOptions,
    clock: Clock,
) -> Plan:
    """Return the fastest plan under any schedule, with the best ones under all others, or notes why there is none.

    A plan whose gradients are late is the answer only where `max_staleness` allows for it; it is named all the same.
    Raise InfeasibleError if no schedule has a plan that may be the answer.
    """
    plans = list[Plan]()
    obstacles = dict[Schedule, PlannerError]()
    for number, schedule in enumerate(SCHEDULES):
        clock.progress.step = str(schedule)
        asked = under(schedule, options)
        try:
            plans.append(find_plan(profile, cluster, asked, clock.part(1 / (len(SCHEDULES) - number))))
        except PlannerError as error:
            obstacles[schedule] = error

    candidates = [plan for plan in plans if _may_be_the_answer(plan, options)]
    if not candidates:
        raise obstacles[FLUSH]
    best = min(candidates, key=seconds_per_microbatch)

    best = _noting_other_sizes(best, plans)
    for schedule, obstacle in obstacles.items():
        best = best.noting(f"there is no plan under {schedule}: {obstacle.message}")
    rows = tuple(described_plan(str(plan.schedule), plan) for plan in plans)
    return best.model_copy(update={"schedules": rows})


def under(schedule: Schedule, options: SolveOptions) -> SolveOptions:
    """Return the options under another schedule; one that divides no minibatches has one microbatch in each."""
    microbatches = options.microbatches if schedule.divides else None
    return replace(options, schedule=schedule, microbatches=microbatches)


def _may_be_the_answer(plan: Plan, options: SolveOptions) -> bool:
    """Return whether the plan's gradients are no later than allowed, and its minibatches those that were asked for."""
    in_time = options.max_staleness is not None or not plan.schedule.asynchronous
    return in_time and options.microbatches in (None, plan.microbatches)


def _noting_other_sizes(best: Plan, plans: Sequence[Plan]) -> Plan:
    """Say of the fastest plan which others update after another number of samples, and after how many."""
    sizes = dict[tuple[int, int], list[str]]()
    for plan in plans:
        if plan.samples_per_update != best.samples_per_update:
            sizes.setdefault(plan.samples_per_update, []).append(str(plan.schedule))
    for size, names in sizes.items():
        best = best.noting(
            f"plans under {', '.join(names)} update after {update_words(size, best.microbatch_size)}, "
            f"this one after {update_words(best.samples_per_update, best.microbatch_size)}"
        )
    return best


def with_synchronous(
    profile: Profile,
    plan: Plan,
    options: SolveOptions,
    clock: Clock,
) -> Plan:
    """Return an asynchronous plan with the best one found under 1F1B with a flush; others as they are.

    Late gradients have to earn something: where no schedule was asked for, and the plan is not `required_speedup`
    times as fast as the other, whose gradients are never late, the other is the answer. The search for it takes no
    longer than that for the plan, or `LEAST_S`.
    """
    if not plan.schedule.asynchronous:
        return plan
    try:
        drained = drained_options(plan, options)
        synchronous = find_plan(profile, plan.cluster, drained, clock.at_most(max(LEAST_S, plan.solver.seconds)))
        synchronous = or_interleaved(profile, synchronous, drained, clock.at_most(LEAST_S))
    except PlannerError as error:
        return plan.noting(f"there is no synchronous plan to compare it with: {error.message}")

    speedup = seconds_per_microbatch(synchronous) / seconds_per_microbatch(plan)
    if not options.asked and speedup < required_speedup(plan, synchronous):
        return synchronous.noting(_why_synchronous(synchronous, plan, 1 / speedup))
    return plan.model_copy(update={"synchronous": described_plan(SYNCHRONOUS, synchronous)})


def drained_options(plan: Plan, options: SolveOptions) -> SolveOptions:
    """Return the options for the synchronous plan that updates after as many samples as `plan`, where one can.

    Under 1f1b a pipeline updates after every microbatch, or a few: a pipeline that drains as often is no use. So,
    unless the user gave a minibatch, the synchronous plan has as many microbatches as such plans usually have. A single
    stage updates after one microbatch on each replica, under both.
    """
    microbatches = None
    if plan.schedule.divides:
        microbatches = plan.microbatches
    elif len(plan.stages) == 1 and options.minibatch is None:
        microbatches = plan.stages[0].replicas
    minibatch = options.minibatch if microbatches is None else None
    return replace(
        options,
        schedule=FLUSH,
        microbatches=microbatches,
        minibatch=minibatch,
        max_staleness=None,
    )


def required_speedup(plan: Plan, synchronous: Plan) -> float:
    """Return how many times as fast as the synchronous plan an asynchronous one must be to be the answer.

    Late gradients need `LATER`. Where none is late, plans are compared at equal samples per update alone.
    """
    if plan.staleness:
        return LATER
    return 1 - ALIKE if plan.samples_per_update == synchronous.samples_per_update else 0.0


def _why_synchronous(synchronous: Plan, plan: Plan, ratio: float) -> str:
    """Say how many times as fast the synchronous plan is, and after how many samples each of the two updates."""
    times = "" if abs(ratio - 1) < ALIKE else f"{ratio:.2f} times "
    late = f", whose gradients are up to {plan.staleness} updates late" if plan.staleness else ""
    sizes = ""
    if plan.samples_per_update != synchronous.samples_per_update:
        this = update_words(synchronous.samples_per_update, synchronous.microbatch_size)
        that = update_words(plan.samples_per_update, plan.microbatch_size)
        sizes = f"; this plan updates after {this}, that one after {that}"
    return (
        f"this plan under {synchronous.schedule} is {times}as fast as the best under {plan.schedule}, "
        f"{short_config(plan.config)}{late}{sizes}; for that one, solve with `schedule={plan.schedule}`"
    )
