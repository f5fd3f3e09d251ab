"""Plans under several schedules: the fastest of all, and the best synchronous plan beside an
asynchronous one.
"""

from collections.abc import Sequence
from contextlib import suppress

from planner.errors import PlannerError
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay, short_config
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import AUTO, SCHEDULES
from planner.schedule.schedule import Schedule
from planner.solver.alternatives.interleaved import prefer_interleaved_if_faster
from planner.solver.alternatives.table import described_plan, seconds_per_microbatch
from planner.solver.find_plan import find_plan
from planner.solver.request import Request
from planner.solver.tuning.record import Tuning
from planner.stages.replicas import update_words
from planner.units import as_fast, counted

SYNCHRONOUS = "best synchronous plan"
OUT_OF_TIME = (
    "the time limit ended the search for synchronous plans to compare: there may be faster ones"
)


def under_every_schedule(request: Request) -> Plan:
    """Return the fastest plan under any schedule, with the best ones under all others, or notes why
    there is none.

    A plan whose gradients are stale is the answer only where `max_staleness` allows for it; it is
    named all the same. Raise InfeasibleError if no schedule has a plan that may be the answer.
    """
    plans = list[Plan]()
    obstacles = dict[Schedule, PlannerError]()
    for number, schedule in enumerate(SCHEDULES):
        request.clock.progress.step = str(schedule)
        share = 1 / (len(SCHEDULES) - number)
        try:
            plans.append(find_plan(request.under(schedule).within(share)))
        except PlannerError as error:
            obstacles[schedule] = error

    candidates = [plan for plan in plans if _may_be_the_answer(plan, request)]
    if not candidates:
        raise obstacles[FLUSH]

    best = min(candidates, key=seconds_per_microbatch)

    best = _noting_other_sizes(best, plans)
    for schedule, obstacle in obstacles.items():
        best = best.noting(f"there is no plan under {schedule}: {obstacle.message}")
    return replace(
        best, schedules=tuple(described_plan(str(plan.schedule), plan) for plan in plans)
    )


def _may_be_the_answer(plan: Plan, request: Request) -> bool:
    """Return whether the plan's gradients are no staler than allowed, and its global batch is the
    one that was given.
    """
    options = request.options
    if plan.schedule.asynchronous and options.max_staleness is None:
        return False
    if options.minibatch is None and options.microbatches is None:
        return True

    microbatches = request.under(FLUSH).setting.microbatches
    size = microbatches * (request.profile.microbatch_size or 1)
    return plan.samples_per_update == (size, size)


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
            f"{update_words(size, best.microbatch_size)}, this one after {_batch_words(best)}"
        )

    return best


def holding_minibatch(request: Request) -> tuple[Request, str]:
    """Return the request under a schedule that has the global batch that was given, where no
    schedule was; and a note on that.

    Where a microbatch is the whole minibatch, the default schedule cannot have one of several.
    """
    options = request.options
    size = request.profile.microbatch_size
    if options.schedule == AUTO or options.asked or options.order.divides:
        return request, ""
    if options.minibatch is None or size is None or options.minibatch <= size:
        return request, ""

    note = (
        f"this plan is under {FLUSH}, as the global batch is of {options.minibatch} samples: "
        f"under {options.order} a minibatch has the {size} samples that were profiled"
    )
    return request.under(FLUSH), note


def with_synchronous(plan: Plan, request: Request) -> Plan:
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

    options = request.options
    tuning = request.tuning
    plan = _prefer_data_parallel_if_as_fast(plan, request)
    try:
        synchronous = _best_drained(plan, same_batch(request, plan))
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

    plan = replace(plan, synchronous=_row(synchronous))
    plan = _noting_time(plan, synchronous)
    return _with_usual_batch(plan, request)


def _prefer_data_parallel_if_as_fast(plan: Plan, request: Request) -> Plan:
    """Return a single stage where a pipeline with stale gradients is not enough faster, or the
    plan.
    """
    options = request.options
    tuning = request.tuning
    enough = tuning.evaluate.min_speedup_per_stale_update
    batch_given = options.minibatch is not None or options.microbatches is not None
    if options.asked or batch_given or not plan.staleness:
        return plan
    if plan.predicted.speedup_over_data_parallel >= enough:
        return plan

    soon = request.with_clock(request.clock.at_most(tuning.answer.alternatives_s))
    with suppress(PlannerError):  # the model may not fit one GPU
        parallel = find_plan(soon.with_options(replace(options, max_stages=1)))
        slower = seconds_per_microbatch(parallel) / seconds_per_microbatch(plan)
        if slower < enough:
            # The user asked for all plans, which the bound must hold for.
            bound_s = min(parallel.solver.lower_bound_s, plan.solver.lower_bound_s)
            report = replace(
                parallel.solver, rules=plan.solver.rules, lower_bound_s=bound_s
            ).for_time(
                parallel.predicted.seconds_per_minibatch,
                parallel.solver.cost_model_s,
                tuning.evaluate.timing_share,
            )
            parallel = replace(parallel, solver=report)
            return parallel.noting(_why_data_parallel(parallel, plan, slower))

    return plan


def _with_usual_batch(plan: Plan, request: Request) -> Plan:
    """Return the plan with the best synchronous one of as many microbatches as such plans usually
    have.
    """
    options = request.options
    if plan.schedule.divides or options.minibatch is not None or options.microbatches is not None:
        return plan

    usual = _drained(request, None)
    if usual.setting.microbatches == same_batch(request, plan).options.microbatches:
        return plan

    with suppress(PlannerError):  # there is one with the plan's own global batch
        drained = _best_drained(plan, usual)
        plan = replace(plan, synchronous_usual=_row(drained))
        plan = _noting_time(plan, drained)

    return plan


def _row(synchronous: Plan) -> OtherWay:
    return described_plan(SYNCHRONOUS, synchronous)


def _noting_time(plan: Plan, synchronous: Plan) -> Plan:
    """Return the plan with what was not looked at for the synchronous one beside it."""
    ended = OUT_OF_TIME in synchronous.notes and OUT_OF_TIME not in plan.notes
    return plan.noting(OUT_OF_TIME) if ended else plan


def _best_drained(plan: Plan, request: Request) -> Plan:
    """Return the fastest synchronous plan on the plan's cluster, also of an interleaved
    pipeline.
    """
    least_s = request.tuning.answer.alternatives_s
    searching = request.clock.at_most(max(least_s, plan.solver.seconds))
    synchronous = find_plan(request.with_clock(searching))
    if searching.passed:
        synchronous = synchronous.noting(OUT_OF_TIME)
    soon = request.with_clock(request.clock.at_most(least_s))
    return prefer_interleaved_if_faster(synchronous, soon)


def same_batch(request: Request, plan: Plan) -> Request:
    """Ask for the synchronous plan with the global batch of `plan`, or with the one that was given.

    Under 1f1b a stage updates after a microbatch on each of its replicas, so the global batch is
    that of the stage with the most replicas.
    """
    if request.options.minibatch is not None:
        return _drained(request, None)
    if plan.schedule.divides:
        return _drained(request, plan.microbatches)
    return _drained(request, max(plan.replicas))


def _drained(request: Request, microbatches: int | None) -> Request:
    options = replace(
        request.options,
        schedule=FLUSH,
        microbatches=microbatches,
        max_staleness=None,
    )
    return request.with_options(options)


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


def _batch_words(plan: Plan) -> str:
    """Write the samples whose gradients make an update of the plan."""
    return update_words(plan.samples_per_update, plan.microbatch_size)


def _why_data_parallel(parallel: Plan, plan: Plan, ratio: float) -> str:
    """Say how little a pipeline with stale gradients gains over data parallelism."""
    return (
        f"the best pipeline under {plan.schedule}, {short_config(plan.config)}, is "
        f"{as_fast(ratio)} as data parallelism, and its gradients are up to "
        f"{counted(plan.staleness, 'update')} stale; it updates after {_batch_words(plan)}, this "
        f"plan after {_batch_words(parallel)}; for that one, solve with "
        f"`schedule={plan.schedule}`"
    )


def _why_this_batch(synchronous: Plan, plan: Plan) -> str:
    """Say why a plan under another schedule has the global batch that was asked for."""
    return (
        f"this plan is under {synchronous.schedule}, which updates after the "
        f"{_batch_words(synchronous)} that were asked for: under {plan.schedule} a stage updates "
        f"after a microbatch on each of its replicas, in {short_config(plan.config)} after "
        f"{_batch_words(plan)}"
    )


def _why_another_batch(plan: Plan, synchronous: Plan) -> str:
    """Say that a plan under the schedule that was asked for has another global batch."""
    return (
        f"the global batch is {_batch_words(plan)}, not {_batch_words(synchronous)}: under "
        f"{plan.schedule} a stage updates after a microbatch on each of its replicas"
    )


def _why_synchronous(synchronous: Plan, plan: Plan, ratio: float, tuning: Tuning) -> str:
    """Say how many times as fast the synchronous plan is, and after how many samples each of the
    two updates.
    """
    times = f"{ratio:.2f} times "
    if abs(ratio - 1) < tuning.answer.indistinguishable_share:
        times = ""
    late = ""
    if plan.staleness:
        late = f", whose gradients are up to {counted(plan.staleness, 'update')} stale"
    sizes = ""
    if plan.samples_per_update != synchronous.samples_per_update:
        this = _batch_words(synchronous)
        sizes = f"; this plan updates after {this}, that one after {_batch_words(plan)}"

    return (
        f"this plan under {synchronous.schedule} is {times}as fast as the best under "
        f"{plan.schedule}, {short_config(plan.config)}{late}{sizes}; for that one, solve with "
        f"`schedule={plan.schedule}`"
    )
