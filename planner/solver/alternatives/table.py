"""The table of other ways beside a plan, and the row that takes its place where the search found
nothing as fast.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from planner.errors import InfeasibleError, PlannerError
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay, SolverReport, config_words, short_config
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import AUTO
from planner.schedule.schedule import Schedule
from planner.solver.alternatives.simpler_ways import simplest_equal_ways
from planner.solver.alternatives.usual_ways import Way, usual_ways
from planner.solver.assemble import complete
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.evaluate.pipelines import too_large
from planner.solver.find_plan import STALER
from planner.solver.problem.bounds import relaxed_s
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.request import Request, options_of


@dataclass(frozen=True)
class Rules:
    """Which rows may be the answer."""

    request: Request
    schedules: tuple[Schedule, ...]  # under which
    samples: tuple[int, int] | None  # per update; None where the schedule decides that

    def allow(self, way: Way) -> bool:
        """Return whether the way is one that the user asked for, and trains as many samples per
        update.
        """
        if way.problem.schedule not in self.schedules:
            return False
        return self.samples in (None, way.samples_per_update) and self._allow_stages(way)

    def _allow_stages(self, way: Way) -> bool:
        """Return whether the stages are as the options want them, fit, and leave no replica
        idle.
        """
        options = self.request.settled().options

        # No row is recomputed as these say, comes from a solver that was named, or divides layers.
        if options.names_solver or options.recompute in ("always", "blocks"):
            return False
        if 1 not in options.tensor:
            return False

        problem = replace(way.problem, rules=options.rules)
        stages = way.plan.stages
        recomputes = any(stage.options.recomputes for stage in stages)
        if recomputes and options.recompute == "never":
            return False
        return problem.allowed_sharding.allows(stages[0].options.sharding) and problem.allows(
            way.plan
        )


def with_baselines(plan: Plan, request: Request) -> Plan:
    """Return the plan with the table of other ways on its cluster, under its schedule.

    When the time is over, or after some seconds, what is left is priced by the cost model alone.
    """
    try:
        ways = _ways_beside(plan, request)
    except PlannerError as error:
        return _without_table(plan, error)
    return _with_rows(plan, ways)


def no_slower_than_usual(plan: Plan, request: Request) -> Plan:
    """Return the plan with its table; where a row that the options allow is faster, that row as the
    plan.

    Only rows of equally many samples per update are compared. Those that look faster are simulated,
    whatever time is left: by the cost model alone, a row that waits for messages looks faster than
    it is.
    """
    try:
        ways = _ways_beside(plan, request)
    except PlannerError as error:
        return _without_table(plan, error)

    schedules = _allowed_schedules(plan.schedule, request.options)
    rules = Rules(request, schedules, plan.samples_per_update)
    tuning = request.tuning
    last = Budget.last(request.clock, tuning.answer.alternatives_s, tuning.budget)
    ways = [
        _simulated(way, last) if _seems_faster(way, plan) and rules.allow(way) else way
        for way in ways
    ]
    candidates = [way for way in ways if _faster(way, plan) and rules.allow(way)]

    best = _fastest_complete(candidates, plan, request)
    plan = plan if best is None else _in_place_of(plan, best)
    simpler = simplest_equal_ways(plan, filter(rules.allow, ways), tuning)
    equal = _fastest_complete(simpler, plan, request)
    return _with_rows(plan if equal is None else _simpler_than(plan, equal), ways)


def _simpler_than(plan: Plan, simpler: Plan) -> Plan:
    """Return a simpler plan in place of one that is as fast, as far as estimates can tell."""
    gain = seconds_per_microbatch(simpler) / seconds_per_microbatch(plan) - 1
    faster = f"{_stages_words(plan)} is estimated to be {max(gain, 0.0):.1%} faster"
    chosen = _in_place_of(plan, simpler).noting(
        f"{faster}, which is within the error of estimates, and is less simple"
    )
    return replace(chosen, estimated_faster=faster)


def _stages_words(plan: Plan) -> str:
    """Name a plan by its stages, and by what its replicas divide where it has one stage."""
    (stage, *others) = plan.stages
    if others or not stage.shards_optimizer:
        return config_words(plan.config)
    return (
        f"{config_words(plan.config)} with {stage.sharding_words.removeprefix('data parallel, ')}"
    )


def fastest_usual(request: Request) -> Plan | None:
    """Return the fastest of the usual ways that the options allow, for a search that had no answer;
    None without any.

    The plan has no table yet.
    """
    ways = _simulated_ways(request)
    order = request.options.order
    samples = None
    if order.divides:
        minibatch = request.setting.microbatches * (request.profile.microbatch_size or 1)
        samples = (minibatch, minibatch)

    rules = Rules(request, (order,), samples)
    return _fastest_complete(filter(rules.allow, ways), None, request)


def described_plan(name: str, plan: Plan) -> OtherWay:
    """Describe a whole plan as another way to train."""
    stages = range(len(plan.stages))
    return OtherWay(
        name=name,
        config=plan.config,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        samples_per_update=plan.samples_per_update,
        seconds_per_microbatch=seconds_per_microbatch(plan),
        memory_bytes=max(map(plan.memory_bytes, stages)),
        over_memory_bytes=max(map(plan.lacking_bytes, stages)),
        staleness=plan.staleness,
    )


def seconds_per_microbatch(plan: Plan) -> float:
    """Return the predicted seconds of a microbatch, which plans with other minibatches have in
    common.
    """
    return plan.predicted.seconds_per_minibatch / plan.microbatches


def _allowed_schedules(schedule: Schedule, options: SolveOptions) -> tuple[Schedule, ...]:
    """Return the schedules of the rows that may take the place of a plan.

    Where the user named none, those are also the rows whose gradients are never late.
    """
    if options.asked and options.schedule != AUTO:
        return (schedule,)
    return (schedule, FLUSH)


def _ways_beside(plan: Plan, request: Request) -> list[Way]:
    return _simulated_ways(request.with_options(options_of(plan)))


def _simulated_ways(request: Request) -> list[Way]:
    """Return the usual ways, simulated as far as the instructions for the table go: a row has the
    same time whatever the search left.
    """
    return list(usual_ways(request, table_budget(request)))


def table_budget(request: Request) -> Budget:
    """Return the budget of a table of usual ways."""
    tuning = request.tuning
    answer = tuning.answer
    return Budget.counted(request.clock, answer.table_instructions, answer.table_s, tuning.budget)


def _simulated(way: Way, budget: Budget) -> Way:
    """Return the way with its simulated time, if there is one to be had."""
    if way.plan.simulated or too_large(way.problem, way.plan.stages):
        return way
    return replace(way, plan=evaluate(replace(way.problem, budget=budget), way.plan.stages))


def _seems_faster(way: Way, plan: Plan) -> bool:
    """Return whether the way is shown with less time than the plan, by more than estimates are
    true.
    """
    return way.seconds_per_microbatch < _clearly_faster_s(way.problem, plan)


def _faster(way: Way, plan: Plan) -> bool:
    """Return whether the way seems faster, and would be if it waits as most plans that were not
    simulated.
    """
    if plan.predicted.by == "cost model":
        return _seems_faster(way, plan)
    comparable_s = way.problem.comparable_s(way.plan) / way.problem.microbatches
    return comparable_s < _clearly_faster_s(way.problem, plan)


def _clearly_faster_s(problem: Problem, plan: Plan) -> float:
    """Return seconds per microbatch below which another plan is told apart from this one."""
    return seconds_per_microbatch(plan) * (1 - problem.tuning.answer.indistinguishable_share)


def _in_place_of(plan: Plan, best: Plan) -> Plan:
    """Return a faster plan with what stands beside the one whose place it takes."""
    chosen = described_plan(str(best.schedule), best)
    schedules = tuple(chosen if way.schedule is best.schedule else way for way in plan.schedules)
    notes = tuple(note for note in plan.notes if STALER not in note)  # this plan is faster
    best = replace(best, notes=notes, schedules=schedules)
    if best.schedule.asynchronous:
        best = replace(
            best,
            synchronous=plan.synchronous,
            synchronous_usual=plan.synchronous_usual,
        )

    if best.schedule is plan.schedule:
        return best
    return best.noting(
        f"this plan under {best.schedule} is faster than the best that was found under "
        f"{plan.schedule}, {short_config(plan.config)}, which updates after as many samples"
    )


def _fastest_complete(
    ways: Iterable[Way],
    slower: Plan | None,
    request: Request,
) -> Plan | None:
    """Return the plan of the fastest way that has room for the copies of weights that several
    stages use.

    What a search knew of a `slower` plan under the same schedule holds for this one, too.
    """
    accepts = request.options.accept_divided_loss
    for way in sorted(ways, key=lambda way: way.seconds_per_microbatch):
        known = _report_without_search(way)
        if slower is not None and slower.schedule is way.problem.schedule:
            known = slower.solver
        report = known.for_time(
            way.plan.seconds, way.plan.price_s, request.tuning.evaluate.timing_share
        )
        with suppress(InfeasibleError):
            return complete(way.problem, way.plan, report, accepts_loss=accepts)

    return None


def _report_without_search(way: Way) -> SolverReport:
    """Return what is known of a plan that no search found: its distance from perfect balance."""
    return SolverReport(
        name="usual ways",
        status="feasible",
        lower_bound_s=relaxed_s(way.problem),
        gap=1.0,
        seconds=0.0,
        exhausted=False,
    )


def _with_rows(plan: Plan, ways: Iterable[Way]) -> Plan:
    return replace(plan, baselines=tuple(way.described() for way in ways))


def _without_table(plan: Plan, error: PlannerError) -> Plan:
    return plan.noting(f"the baselines were not priced: {error.message}")
