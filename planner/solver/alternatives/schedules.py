"""Plans under several schedules: the fastest of all, and the best synchronous plan beside an
asynchronous one.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from planner.errors import PlannerError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import AUTO, SCHEDULES
from planner.schedule.schedule import Schedule
from planner.solver.alternatives.interleaved import or_interleaved
from planner.solver.alternatives.table import described_plan, seconds_per_microbatch
from planner.solver.clock import Clock
from planner.solver.find_plan import find_plan
from planner.solver.tuning.record import Tuning
from planner.stages.replicas import update_words
from planner.units import as_fast, counted

SYNCHRONOUS = "best synchronous plan"
OUT_OF_TIME = (
    "the search for synchronous plans beside this one ended with its time: there may be faster ones"
)


def under_every_schedule(
    profile: Profile,
    cluster: Cluster,
    options: SolveOptions,
    clock: Clock,
    tuning: Tuning,
) -> Plan:
    """Return the fastest plan under any schedule, with the best ones under all others, or notes why
    there is none.

    A plan whose gradients are stale is the answer only where `max_staleness` allows for it; it is
    named all the same. Raise InfeasibleError if no schedule has a plan that may be the answer.
    """
    plans = list[Plan]()
    obstacles = dict[Schedule, PlannerError]()
    for number, schedule in enumerate(SCHEDULES):
        clock.progress.step = str(schedule)
        asked = under(schedule, options)
        try:
            plans.append(
                find_plan(
                    profile, cluster, asked, clock.part(1 / (len(SCHEDULES) - number)), tuning
                )
            )
        except PlannerError as error:
            obstacles[schedule] = error

    microbatches = None
    if options.minibatch is not None or options.microbatches is not None:
        microbatches = under(FLUSH, options).microbatches_on(cluster, profile)
    size = (microbatches or 1) * (profile.microbatch_size or 1)
    candidates = [
        plan
        for plan in plans
        if _is_in_time(plan, options)
        and (microbatches is None or plan.samples_per_update == (size, size))
    ]
    if not candidates:
        raise obstacles[FLUSH]
    best = min(candidates, key=seconds_per_microbatch)

    best = _noting_other_sizes(best, plans)
    for schedule, obstacle in obstacles.items():
        best = best.noting(f"there is no plan under {schedule}: {obstacle.message}")
    rows = tuple(described_plan(str(plan.schedule), plan) for plan in plans)
    return best.model_copy(update={"schedules": rows})


def under(schedule: Schedule, options: SolveOptions) -> SolveOptions:
    """Return the options under another schedule; one that divides no minibatches has one microbatch
    in each.
    """
    microbatches = options.microbatches if schedule.divides else None
    return replace(options, schedule=schedule, microbatches=microbatches)


def _is_in_time(plan: Plan, options: SolveOptions) -> bool:
    """Return whether the plan's gradients are no later than allowed."""
    return options.max_staleness is not None or not plan.schedule.asynchronous


def _noting_other_sizes(best: Plan, plans: Sequence[Plan]) -> Plan:
    """Say of the fastest plan which others update after another number of samples, and after how
    many.
    """
    sizes = dict[tuple[int, int], list[str]]()
    for plan in plans:
        if plan.samples_per_update != best.samples_per_update:
            sizes.setdefault(plan.samples_per_update, []).append(str(plan.schedule))
    for size, names in sizes.items():
        best = best.noting(
            f"plans under {', '.join(names)} update after "
            f"{update_words(size, best.microbatch_size)}, "
            f"this one after {update_words(best.samples_per_update, best.microbatch_size)}"
        )
    return best


def holding_minibatch(profile: Profile, options: SolveOptions) -> tuple[SolveOptions, str]:
    """Return options whose schedule has the global batch that was given, where no schedule was; and
    a note on that.

    Where a microbatch is the whole minibatch, the default schedule cannot have one of several.
    """
    size = profile.microbatch_size
    if options.schedule == AUTO or options.asked or options.order.divides:
        return options, ""
    if options.minibatch is None or size is None or options.minibatch <= size:
        return options, ""
    note = (
        f"this plan is under {FLUSH}, as the global batch is of {options.minibatch} samples: "
        f"under {options.order} a "
        f"minibatch has the {size} samples that were profiled"
    )
    return replace(options, schedule=FLUSH), note


def with_synchronous(
    profile: Profile,
    plan: Plan,
    options: SolveOptions,
    clock: Clock,
    tuning: Tuning,
) -> Plan:
    """Return an asynchronous plan with the best ones found under 1F1B with a flush; others as they
    are.

    There are two, because the size of a global batch decides how much draining costs: one has the
    plan's global batch, and one the usual number of microbatches, where the user has said nothing
    of either. The search for each takes no longer than that for the plan, or some seconds.

    Stale gradients have to earn something: where no schedule was asked for, and the plan is not
    `required_speedup` times as fast as the one with its global batch, that one is the answer. It
    is, too, where it alone has the global batch that was asked for. Of plans with another global
    batch only data parallelism takes its place, with a microbatch on each GPU as the schedule
    itself has it.
    """
    if not plan.schedule.asynchronous:
        return plan
    plan = _or_data_parallel(profile, plan, options, clock, tuning)
    try:
        synchronous = _best_drained(profile, plan, drained_options(plan, options), clock, tuning)
    except PlannerError as error:
        return plan.noting(f"there is no synchronous plan to compare it with: {error.message}")

    speedup = seconds_per_microbatch(synchronous) / seconds_per_microbatch(plan)
    holds = options.minibatch is None or plan.samples_per_update == synchronous.samples_per_update
    if not options.asked and not holds:
        return synchronous.noting(_why_this_batch(synchronous, plan))
    if not options.asked and speedup < required_speedup(plan, synchronous, tuning):
        return synchronous.noting(_why_synchronous(synchronous, plan, 1 / speedup, tuning))
    if not holds:
        plan = plan.noting(_why_another_batch(plan, synchronous))

    plan = _beside(plan, "synchronous", synchronous)
    return _with_usual_batch(profile, plan, options, clock, tuning)


def _or_data_parallel(
    profile: Profile,
    plan: Plan,
    options: SolveOptions,
    clock: Clock,
    tuning: Tuning,
) -> Plan:
    """Return a single stage where a pipeline with stale gradients is not enough faster, or the
    plan.
    """
    enough = tuning.evaluate.min_speedup_per_stale_update
    chosen_by_user = (
        options.asked or options.minibatch is not None or options.microbatches is not None
    )
    if chosen_by_user or not plan.staleness or plan.predicted.speedup_over_data_parallel >= enough:
        return plan

    single_stage = replace(options, max_stages=1)
    soon = clock.at_most(tuning.answer.alternatives_s)
    with suppress(PlannerError):  # the model may not fit one GPU
        parallel = find_plan(profile, plan.cluster, single_stage, soon, tuning)
        slower = seconds_per_microbatch(parallel) / seconds_per_microbatch(plan)
        if slower < enough:
            # The single stage is what was found, not what the user asked for.
            report = parallel.solver.model_copy(update={"rules": plan.solver.rules})
            parallel = parallel.model_copy(update={"solver": report})
            return parallel.noting(_why_data_parallel(parallel, plan, slower))
    return plan


def _with_usual_batch(
    profile: Profile,
    plan: Plan,
    options: SolveOptions,
    clock: Clock,
    tuning: Tuning,
) -> Plan:
    """Return the plan with the best synchronous one of as many microbatches as such plans usually
    have.
    """
    if plan.schedule.divides or options.minibatch is not None or options.microbatches is not None:
        return plan
    usual = replace(options, schedule=FLUSH, max_staleness=None)
    if usual.microbatches_on(plan.cluster, profile) == drained_options(plan, options).microbatches:
        return plan

    with suppress(PlannerError):  # there is one with the plan's own global batch
        drained = _best_drained(profile, plan, usual, clock, tuning)
        plan = _beside(plan, "synchronous_usual", drained)
    return plan


def _beside(plan: Plan, field: str, synchronous: Plan) -> Plan:
    """Return the plan with a synchronous one beside it, and what was not looked at for that one."""
    plan = plan.model_copy(update={field: described_plan(SYNCHRONOUS, synchronous)})
    ended = OUT_OF_TIME in synchronous.notes and OUT_OF_TIME not in plan.notes
    return plan.noting(OUT_OF_TIME) if ended else plan


def _best_drained(
    profile: Profile,
    plan: Plan,
    options: SolveOptions,
    clock: Clock,
    tuning: Tuning,
) -> Plan:
    """Return the fastest synchronous plan on the plan's cluster, also of an interleaved
    pipeline.
    """
    least_s = tuning.answer.alternatives_s
    searching = clock.at_most(max(least_s, plan.solver.seconds))
    synchronous = find_plan(profile, plan.cluster, options, searching, tuning)
    if searching.passed:
        synchronous = synchronous.noting(OUT_OF_TIME)
    return or_interleaved(profile, synchronous, options, clock.at_most(least_s), tuning)


def drained_options(plan: Plan, options: SolveOptions) -> SolveOptions:
    """Return the options for the synchronous plan with the global batch of `plan`, or with the one
    that was given.

    Under 1f1b a stage updates after a microbatch on each of its replicas, so the global batch is
    that of the stage with the most replicas.
    """
    microbatches = None
    if options.minibatch is None:
        microbatches = plan.microbatches if plan.schedule.divides else max(plan.replicas)
    return replace(
        options,
        schedule=FLUSH,
        microbatches=microbatches,
        max_staleness=None,
    )


def required_speedup(plan: Plan, synchronous: Plan, tuning: Tuning) -> float:
    """Return how many times as fast as the synchronous plan an asynchronous one must be to be the
    answer.

    Where no gradient is stale, plans are compared at equal samples per update alone.
    """
    if plan.staleness:
        return tuning.evaluate.min_speedup_per_stale_update
    if plan.samples_per_update == synchronous.samples_per_update:
        return 1 - tuning.answer.indistinguishable_share
    return 0.0


def _why_data_parallel(parallel: Plan, plan: Plan, ratio: float) -> str:
    """Say how little a pipeline with stale gradients gains over data parallelism."""
    this = update_words(parallel.samples_per_update, parallel.microbatch_size)
    that = update_words(plan.samples_per_update, plan.microbatch_size)
    return (
        f"the best pipeline under {plan.schedule}, {short_config(plan.config)}, is "
        f"{as_fast(ratio)} as data "
        f"parallelism, and its gradients are up to {counted(plan.staleness, 'update')} stale; it "
        f"updates after "
        f"{that}, this plan after {this}; for that one, solve with `schedule={plan.schedule}`"
    )


def _why_this_batch(synchronous: Plan, plan: Plan) -> str:
    """Say why a plan under another schedule has the global batch that was asked for."""
    this = update_words(synchronous.samples_per_update, synchronous.microbatch_size)
    that = update_words(plan.samples_per_update, plan.microbatch_size)
    return (
        f"this plan is under {synchronous.schedule}, which updates after the {this} that were "
        f"asked for: under "
        f"{plan.schedule} a stage updates after a microbatch on each of its replicas, in "
        f"{short_config(plan.config)} "
        f"after {that}"
    )


def _why_another_batch(plan: Plan, synchronous: Plan) -> str:
    """Say that a plan under the schedule that was asked for has another global batch."""
    asked = update_words(synchronous.samples_per_update, synchronous.microbatch_size)
    actual = update_words(plan.samples_per_update, plan.microbatch_size)
    return (
        f"the global batch is {actual}, not {asked}: under {plan.schedule} a stage updates after "
        f"a microbatch on each "
        "of its replicas"
    )


def _why_synchronous(synchronous: Plan, plan: Plan, ratio: float, tuning: Tuning) -> str:
    """Say how many times as fast the synchronous plan is, and after how many samples each of the
    two updates.
    """
    is_as_fast = abs(ratio - 1) < tuning.answer.indistinguishable_share
    times = "" if is_as_fast else f"{ratio:.2f} times "
    late = (
        f", whose gradients are up to {counted(plan.staleness, 'update')} stale"
        if plan.staleness
        else ""
    )
    sizes = ""
    if plan.samples_per_update != synchronous.samples_per_update:
        this = update_words(synchronous.samples_per_update, synchronous.microbatch_size)
        that = update_words(plan.samples_per_update, plan.microbatch_size)
        sizes = f"; this plan updates after {this}, that one after {that}"
    return (
        f"this plan under {synchronous.schedule} is {times}as fast as the best under "
        f"{plan.schedule}, "
        f"{short_config(plan.config)}{late}{sizes}; for that one, solve with "
        f"`schedule={plan.schedule}`"
    )
