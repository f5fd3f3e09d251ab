"""What to read beside a plan: the ways that people train without a planner, and the best synchronous plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.analysis.given_plan import options_of, problem_of
from planner.cost.candidate import Candidate
from planner.cost.kinds import everything_on, fastest_rank
from planner.cost.layer_costs import LayerCosts
from planner.cost.tensor import layer_costs_on
from planner.errors import PlannerError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay, short_config
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.solver.choose import baselines
from planner.solver.choose.sharded_data_parallel import sharded_data_parallel
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import LATER, Budget, Patience
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation

ONE_GPU, DATA_PARALLEL = "one GPU", "data parallel"
EQUAL_STAGES = "equal stages"  # of equally many blocks
BLOCK_STAGES = (2, 4, 8)  # pipelines of equal blocks, with replicas on the other GPUs, as users of Megatron choose them
SYNCHRONOUS = "best synchronous plan"
LEAST_S = 2.0  # that may be spent beside a search, however quick it was
Pricing = Callable[[Problem, Sequence[Candidate]], Evaluation]


@dataclass(frozen=True)
class Way:
    """One way to train: its name, the problem that it solves, and its stages with their price."""

    name: str
    problem: Problem
    plan: Evaluation

    @property
    def seconds_per_microbatch(self) -> float:
        """Seconds per microbatch, which all ways have in common."""
        return self.plan.seconds / self.problem.microbatches

    @property
    def over_memory_bytes(self) -> int:
        """By how many bytes the GPU that needs most exceeds its memory; 0 if all fit."""
        return self.plan.over_bytes(self.problem.cluster)


def usual_ways(options: SolveOptions, layer_costs: LayerCosts, cluster: Cluster, budget: Budget) -> Iterator[Way]:
    """Yield data parallelism, one GPU, sharded data parallelism, and pipelines of equal blocks under 1F1B with a flush.

    All but the last run under the options' schedule, without chunks. Where that does not divide minibatches, the
    pipelines of blocks take as many microbatches as `plan solve` would. Replicas of the whole model have at least one
    microbatch each. What does not fit the memory recomputes every block, unless the options forbid it. Where GPUs
    differ, data parallelism on those of each kind is one more way.
    """
    gpus, schedule, fastest = cluster.gpus, options.order.unchunked, fastest_rank(layer_costs, cluster)
    problem = problem_of(replace(options, schedule=schedule), layer_costs, cluster, budget)
    alone = Way(ONE_GPU, problem, evaluate(problem, [everything_on(layer_costs, cluster, [fastest])]))
    if schedule.divides:
        # With fewer microbatches than GPUs some of the replicas would idle.
        problem = problem.with_schedule(schedule, max(problem.microbatches, gpus))
    replicated = everything_on(layer_costs, cluster, range(gpus))
    parallel = Way(DATA_PARALLEL, problem, evaluate(problem, [replicated]))
    yield parallel
    if parallel.over_memory_bytes and may_recompute(problem):
        yield _recomputing(parallel)
    for kind, ranks in zip(cluster.kinds, cluster.kind_ranks, strict=True):
        if len(ranks) > 1:
            yield _way(f"{DATA_PARALLEL}, {kind.title} only", problem, [everything_on(layer_costs, cluster, ranks)])
    yield alone
    # The published cost models know no sharding, and naive schedules no overlap.
    if gpus > 1 and schedule.pipelined and problem.simulates:
        sharded = replace(replicated, options=replace(replicated.options, sharded=True))
        yield _way("ZeRO-1", problem, [sharded])
        yield _way("ZeRO-2", problem, [replicated], partial(sharded_data_parallel, zero=2))
        yield _way("ZeRO-3, FSDP", problem, [replicated], partial(sharded_data_parallel, zero=3))
    many = options.microbatches if schedule.divides else None
    drained = replace(options, schedule=FLUSH, microbatches=many, depth="published", cost_model="resource")
    flushed = problem_of(drained, layer_costs, cluster, budget)
    for count in BLOCK_STAGES:
        stages = baselines.equal_blocks(layer_costs, count)
        if gpus % count == 0 and len(stages) == count:
            stages = [replace(stage, options=replace(stage.options, replicas=gpus // count)) for stage in stages]
            yield _way(f"{count} {EQUAL_STAGES}", flushed, stages)


def may_recompute(problem: Problem) -> bool:
    """Return whether stages may recompute; the published cost models do not know what that saves."""
    return problem.rules.recompute != "never" and problem.simulates


def _way(name: str, problem: Problem, stages: Sequence[Candidate], price: Pricing = evaluate) -> Way:
    """Price stages as they are, or recomputing where they do not fit otherwise."""
    way = Way(name, problem, price(problem, stages))
    return _recomputing(way, price) if way.over_memory_bytes and may_recompute(problem) else way


def _recomputing(way: Way, price: Pricing = evaluate) -> Way:
    stages = baselines.recomputing(way.problem.layer_costs, way.plan.stages)
    return Way(f"{way.name}, recomputing", way.problem, price(way.problem, stages))


def with_baselines(profile: Profile, plan: Plan, patience: Patience) -> Plan:
    """Return the plan with the ways that people use without a planner, priced on its cluster under its schedule.

    When the time is over, or after `LEAST_S`, what is left is priced by the cost model alone.
    """
    budget = Budget(patience.at_most(LEAST_S).deadline)
    try:
        ways = tuple(usual_ways(options_of(plan), layer_costs_on(profile, plan.cluster), plan.cluster, budget))
    except PlannerError as error:
        return plan.noting(f"the baselines were not priced: {error.message}")
    return plan.model_copy(update={"baselines": tuple(map(described, ways))})


def with_synchronous(
    profile: Profile, plan: Plan, options: SolveOptions, patience: Patience, *, asked: bool = True
) -> Plan:
    """Return an asynchronous plan with the best one found under 1F1B with a flush; others as they are.

    Late gradients have to earn something: where the schedule was not `asked` for, and the plan is not `LATER` times as
    fast as the other, whose gradients are never late, the other is the answer. The search for it takes no longer than
    that for the plan, from `options`, or `LEAST_S`.
    """
    if not plan.schedule.asynchronous:
        return plan
    drained = replace(options, schedule=FLUSH, microbatches=None, max_staleness=None)
    try:
        found = find_plan(profile, plan.cluster, drained, patience.at_most(max(LEAST_S, plan.solver.seconds)))
    except PlannerError as error:
        return plan.noting(f"there is no synchronous plan to compare it with: {error.message}")
    speed = plan.predicted.seconds_per_minibatch / plan.microbatches
    speed /= found.predicted.seconds_per_minibatch / found.microbatches
    if not asked and plan.staleness and speed * LATER >= 1:
        times = "" if abs(speed - 1) < 0.005 else f"{speed:.2f} times "
        return found.noting(
            f"this plan under {found.schedule} is {times}as fast as the best under {plan.schedule}, "
            f"{short_config(plan.config)}, whose gradients are up to {plan.staleness} updates late; for that one, "
            f"solve with `schedule={plan.schedule}`"
        )
    return plan.model_copy(update={"synchronous": described_plan(SYNCHRONOUS, found)})


def described_plan(name: str, plan: Plan) -> OtherWay:
    """Describe a whole plan as another way to train."""
    stages = range(len(plan.stages))
    return OtherWay(
        name=name,
        config=plan.config,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        seconds_per_microbatch=plan.predicted.seconds_per_minibatch / plan.microbatches,
        memory_bytes=max(map(plan.memory_bytes, stages)),
        over_memory_bytes=max(map(plan.lacking_bytes, stages)),
    )


def described(way: Way) -> OtherWay:
    """Describe a priced way to train."""
    return OtherWay(
        name=way.name,
        config=way.plan.config,
        schedule=way.problem.schedule,
        microbatches=way.problem.microbatches,
        seconds_per_microbatch=way.seconds_per_microbatch,
        memory_bytes=max(way.plan.price.gpu_bytes),
        over_memory_bytes=way.over_memory_bytes,
    )
