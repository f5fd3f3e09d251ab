"""Compare a plan with what one would do without a planner, on the same cluster and under the same cost model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from planner.analysis.given_plan import GivenPlan, options_of, problem_of
from planner.arguments import checked
from planner.cost.candidate import Candidate
from planner.cost.kinds import everything_on, fastest_rank
from planner.cost.layer_costs import LayerCosts
from planner.cost.tensor import layer_costs_on
from planner.cost.utilisation import utilisation
from planner.errors import PlannerError
from planner.formats.cluster import Cluster
from planner.formats.files import Record
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay, short_config, why_whole
from planner.formats.profile import Lengths, Profile
from planner.formats.shown import Shown
from planner.options.solving import SolveOptions
from planner.schedule.instructions import MICROBATCHES_PER_GPU
from planner.schedule.one_stage import FLUSH, GPIPE
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule
from planner.solver.choose.baselines import equal_blocks, equal_time, recomputing
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.find_plan import find_plan, or_interleaved
from planner.solver.problem.budget import LATER, Budget, Patience
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.units import SLACK

ONE_GPU, DATA_PARALLEL = "one GPU", "data parallel"
EQUAL_STAGES = "equal stages"  # of equally many blocks
BLOCK_STAGES = (2, 4, 8)  # pipelines of equal blocks, with replicas on the other GPUs, as users of Megatron choose them
SYNCHRONOUS = "best synchronous plan"
LEAST_S = 2.0  # that may be spent beside a search, however quick it was
CHOSEN, SAME_CUT = "chosen plan", "gpipe, same cut"
# Ways to make batches of samples whose lengths vary, for the same stages.
ORDERS = {"random": "in random order", "buckets": "in buckets"}
PADDED, PACKED = "padded to the longest", "packed"
OWN = (CHOSEN, SAME_CUT, *ORDERS.values(), PADDED, PACKED)  # rows with stages that the planner chose


class ComparisonRow(OtherWay):
    """One way to train the model on the cluster. Times and bytes are per microbatch, which all rows have in common."""

    workers: int
    samples_per_s: float | None  # None if the profile does not know its batch size
    speedup: float | None  # over the way that the comparison names; None where no way fits, or this one does not
    communication_bytes: float  # sent by all workers, per microbatch
    communication_bytes_per_sample: float | None
    communication_cut: float | None  # share of data parallel's bytes that is not sent; None if that sends none
    tokens_per_s: float | None  # None where the model is not of token ids
    flop_utilisation: float | None  # of the workers' peak, by the model's FLOPs; None where one is not known
    idle_share: float  # of the workers' time: bubbles, waits, and communication that is not overlapped
    simulated: bool = True  # False: by the cost model, which knows no waiting


class Comparison(Shown, Record):
    """The chosen plan first, then the baselines."""

    model: str
    cluster: Cluster
    rows: tuple[ComparisonRow, ...]
    # What speed-ups are relative to: data parallelism; where that does not fit, the fastest baseline that does.
    over: str | None = DATA_PARALLEL


@checked
def compare(profile: Profile, plan: Plan, *, patience: Patience | None = None) -> Comparison:
    """Compare a plan with data parallelism, plain and sharded, hand-made pipelines, and GPipe on the same cut.

    Args:
        profile: costs per layer.
        plan: made from this profile; it brings its cluster and schedule.
        patience: how long all of it may take. When the time is over, the cost model prices the rest.

    Raises:
        PlanError: if the plan was made from another profile.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> [row.name for row in planner.compare(profile, plan).rows][:2]
        ['chosen plan', 'data parallel']
    """
    given = GivenPlan.of(profile, plan, patience=patience)
    ways = _ways(given)
    rows = [_row(given, way) for way in ways]
    parallel = next(row for row in rows if row.name == DATA_PARALLEL)
    fitting = [row for row in rows if row.name not in OWN and not row.over_memory_bytes]
    fastest = min(fitting, key=lambda row: row.seconds_per_microbatch, default=None)
    over = fastest if parallel.over_memory_bytes else parallel
    for number, row in enumerate(rows):
        cut = 1 - row.communication_bytes / parallel.communication_bytes if parallel.communication_bytes > 0 else None
        faster = None
        if over is not None and not row.over_memory_bytes:
            faster = over.seconds_per_microbatch / row.seconds_per_microbatch
        rows[number] = row.model_copy(update={"speedup": faster, "communication_cut": cut})
    name = None if over is None else over.name
    return Comparison(model=profile.model, cluster=given.plan.cluster, rows=tuple(rows), over=name)


def _ways(given: GivenPlan) -> "list[Way]":
    """List the chosen plan, what people use, a pipeline of equal times, and GPipe with the plan's stages."""
    layer_costs, plan, cluster = given.layer_costs, given.plan, given.plan.cluster
    options = replace(given.options, schedule=plan.schedule.unchunked)  # the baselines have no chunks
    deadline = given.patience.deadline
    problem = problem_of(options, layer_costs, cluster, Budget.unlimited(deadline))
    ways = [
        Way(CHOSEN, given.problem, Evaluation(given.stages, given.price())),
        *usual_ways(given.options, layer_costs, cluster, Budget(deadline)),
        Way("equal time", problem, evaluate(problem, equal_time(layer_costs, cluster.gpus))),
    ]
    if plan.schedule is not GPIPE and not plan.schedule.chunked:
        microbatches = MICROBATCHES_PER_GPU * cluster.gpus
        drained = replace(options, schedule=GPIPE, microbatches=microbatches, minibatch=None)
        gpipe = problem_of(drained, layer_costs, cluster, Budget.unlimited(deadline))
        ways.append(Way(SAME_CUT, gpipe, evaluate(gpipe, given.stages)))
    return [*ways, *_of_lengths(given)]


def _of_lengths(given: GivenPlan) -> "Iterator[Way]":
    """Yield the plan's stages with other batches, where lengths vary; packed rows are as long as the longest sample."""
    profile = given.layer_costs.given
    if (lengths := profile.lengths) is None:
        return

    def way(name: str, known: Lengths | None, part: float = 1.0) -> Way:
        costs = layer_costs_on(profile.model_copy(update={"lengths": known}), given.plan.cluster)
        problem = replace(given.problem, layer_costs=costs)
        return Way(name, problem, evaluate(problem, given.stages), part)

    for order, name in ORDERS.items():
        if order != lengths.order:
            yield way(name, lengths.model_copy(update={"order": order}))
    yield way(PADDED, None)
    means = zip(map(fmean, lengths.samples), lengths.most, strict=True)
    yield way(PACKED, None, max(mean / most for mean, most in means))


def _row(given: GivenPlan, entry: "Way") -> ComparisonRow:
    profile = given.layer_costs.profile
    size, tokens = profile.microbatch_size, profile.tokens_per_sample
    price, stages, microbatches = entry.plan.price, entry.plan.stages, entry.problem.microbatches
    seconds = entry.seconds_per_microbatch
    sent = entry.part * price.communication_bytes / microbatches
    workers = entry.plan.gpus // price.chunks  # under interleaved each worker runs several stages
    busy = entry.part * busy_s(entry.problem.layer_costs, stages, entry.problem.schedule, microbatches)
    return ComparisonRow(
        **dict(described(entry)),
        workers=workers,
        samples_per_s=None if size is None else size / seconds,
        speedup=None,
        communication_bytes=sent,
        communication_bytes_per_sample=None if size is None else sent / size,
        communication_cut=None,
        tokens_per_s=None if size is None or tokens is None else size * tokens / seconds,
        flop_utilisation=None if given.plan.cluster.kinds else utilisation(profile, 1, seconds, workers),
        idle_share=1 - busy / (workers * seconds),
        simulated=given.simulated if entry.name == CHOSEN else entry.plan.simulated,
    )


def busy_s(layer_costs: LayerCosts, stages: Sequence[Candidate], schedule: Schedule, microbatches: int) -> float:
    """Sum the seconds per microbatch that the workers of all stages compute."""
    total = 0.0
    for stage in stages:
        work = layer_costs.work(stage)
        # All replicas update: once per minibatch, or under 1f1b once per round of as many minibatches as replicas.
        updates = stage.replicas / microbatches if schedule.divides else 1
        # The first microbatch of each replica has no gradients to accumulate into.
        accumulating = max(0, microbatches - stage.replicas) / microbatches
        once_s = float(work.forward_s + work.recompute_s + work.backward_s)
        once_s += updates * float(work.update_s) / stage.options.shards
        once_s += accumulating * float(work.accumulate_s)
        total += stage.options.tensor * once_s  # all ranks of a group compute
    return total


@dataclass(frozen=True)
class Way:
    """One way to train: its name, the problem that it solves, and its stages with their price."""

    name: str
    problem: Problem
    plan: Evaluation
    part: float = 1.0  # of a microbatch that takes as many samples as one of the others

    @property
    def seconds_per_microbatch(self) -> float:
        """Seconds per microbatch, which all ways have in common."""
        return self.part * self.plan.seconds / self.problem.microbatches

    @property
    def over_memory_bytes(self) -> int:
        """By how many bytes the GPU that needs most exceeds its memory; 0 if all fit."""
        return self.plan.over_bytes(self.problem.cluster)


def usual_ways(options: SolveOptions, layer_costs: LayerCosts, cluster: Cluster, budget: Budget) -> Iterator[Way]:
    """Yield data parallelism, one GPU, sharded data parallelism, and pipelines of equal blocks under 1F1B with a flush.

    All but the last run under the options' schedule, without chunks. Replicas of the whole model have at least one
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
    if (lean := _fitting(parallel)) is not parallel:
        yield lean
    for kind, ranks in zip(cluster.kinds, cluster.kind_ranks, strict=True):
        if len(ranks) > 1:
            plan = evaluate(problem, [everything_on(layer_costs, cluster, ranks)])
            yield _fitting(Way(f"{DATA_PARALLEL}, {kind.title} only", problem, plan))
    yield alone
    if gpus > 1:
        for level, name in enumerate(("ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP"), start=1):
            sharded = replace(replicated, options=replace(replicated.options, level=level))
            if level == 2 and schedule.asynchronous:  # as drained as any replicas of the whole model
                problem = problem.with_schedule(FLUSH, -(-problem.microbatches // gpus) * gpus)
            if level == 1 or why_whole(problem.schedule, problem.microbatches, [gpus], [1]) is None:
                yield _fitting(Way(name, problem, evaluate(problem, [sharded])))
    many = options.microbatches if schedule.divides else None
    drained = replace(options, schedule=FLUSH, microbatches=many, depth="published")
    flushed = problem_of(drained, layer_costs, cluster, budget)
    for count in sorted({*BLOCK_STAGES, max(2, min(gpus, max(BLOCK_STAGES)))}):  # 3 on 3 GPUs
        stages = equal_blocks(layer_costs, count)
        if gpus % count == 0 and len(stages) == count:
            stages = [replace(stage, options=replace(stage.options, replicas=gpus // count)) for stage in stages]
            yield _fitting(Way(f"{count} {EQUAL_STAGES}", flushed, evaluate(flushed, stages)))


def _fitting(way: Way) -> Way:
    """Return the way as it is, or with every block recomputing where it does not fit otherwise."""
    if not way.over_memory_bytes or way.problem.rules.recompute == "never":
        return way
    stages = recomputing(way.problem.layer_costs, way.plan.stages)
    return Way(f"{way.name}, recomputing", way.problem, evaluate(way.problem, stages))


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


def under_every_schedule(profile: Profile, cluster: Cluster, options: SolveOptions, patience: Patience) -> Plan:
    """Return the fastest plan under any schedule, with the best ones under all others, or notes why there is none.

    A plan whose gradients are late is the answer only where `max_staleness` allows for it; it is named all the same.
    Raise InfeasibleError if no schedule has a plan that may be the answer.
    """
    found, obstacles = list[Plan](), dict[Schedule, PlannerError]()
    for number, schedule in enumerate(SCHEDULES):
        if patience.progress is not None:
            patience.progress.step = str(schedule)
        own = replace(options, schedule=schedule, microbatches=options.microbatches if schedule.divides else None)
        try:
            found.append(find_plan(profile, cluster, own, patience.part(1 / (len(SCHEDULES) - number))))
        except PlannerError as error:
            obstacles[schedule] = error
    allowed = [plan for plan in found if options.max_staleness is not None or not plan.schedule.asynchronous]
    if not allowed:
        raise obstacles[FLUSH]
    best = min(allowed, key=lambda plan: plan.predicted.seconds_per_minibatch / plan.microbatches)
    for schedule, obstacle in obstacles.items():
        best = best.noting(f"there is no plan under {schedule}: {obstacle.message}")
    return best.model_copy(update={"schedules": tuple(described_plan(str(plan.schedule), plan) for plan in found)})


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
        found = or_interleaved(profile, found, drained, patience.at_most(LEAST_S))
    except PlannerError as error:
        return plan.noting(f"there is no synchronous plan to compare it with: {error.message}")
    speed = plan.predicted.seconds_per_minibatch / plan.microbatches
    speed /= found.predicted.seconds_per_minibatch / found.microbatches
    # Where replicas divide weights to save recomputation, that is what they would do under the other schedule, too.
    worth = LATER if plan.staleness else (1 - SLACK) * (found.stages[0].level > 1)
    if not asked and speed * worth >= 1:
        late = f", whose gradients are up to {plan.staleness} updates late" if plan.staleness else ""
        times = "" if abs(speed - 1) < 0.005 else f"{speed:.2f} times "
        return found.noting(
            f"this plan under {found.schedule} is {times}as fast as the best under {plan.schedule}, "
            f"{short_config(plan.config)}{late}; for that one, solve with `schedule={plan.schedule}`"
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
        staleness=plan.staleness,
    )


def described(way: Way) -> OtherWay:
    return OtherWay(
        name=way.name,
        config=way.plan.config,
        schedule=way.problem.schedule,
        microbatches=way.problem.microbatches,
        seconds_per_microbatch=way.seconds_per_microbatch,
        memory_bytes=max(way.plan.price.gpu_bytes),
        over_memory_bytes=way.over_memory_bytes,
        staleness=max(map(way.problem.schedule.staleness, way.plan.price.in_flight)),
    )
