"""Compare a plan with what one would do without a planner, on the same cluster and under the same cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.analysis.given_plan import GivenPlan, fastest, problem_of
from planner.analysis.usual_ways import DATA_PARALLEL, Way, described, usual_ways
from planner.arguments import checked
from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.utilisation import utilisation
from planner.errors import InputError
from planner.formats.cluster import Cluster
from planner.formats.files import Record
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay
from planner.formats.profile import Profile
from planner.formats.shown import Shown
from planner.options.solving import SolveOptions
from planner.schedule.instructions import MICROBATCHES_PER_GPU
from planner.schedule.one_stage import GPIPE
from planner.schedule.schedule import Schedule
from planner.solver.choose import baselines
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import Budget, Patience
from planner.solver.problem.result import Evaluation

CHOSEN, SAME_CUT = "chosen plan", "gpipe, same cut"
OWN = (CHOSEN, SAME_CUT)  # rows with stages that the planner chose
SOLVING = STRAIGHT = 0.5  # shares of the time left: to search for the plan, then for pipelines without replicas


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
    staleness: int  # updates that the gradients are late
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
def compare(
    profile: Profile,
    cluster: Cluster | None = None,
    *,
    plan: Plan | None = None,
    options: SolveOptions | None = None,
    patience: Patience | None = None,
) -> Comparison:
    """Compare a plan with data parallelism, plain and sharded, hand-made pipelines, and GPipe on the same cut.

    Args:
        profile: costs per layer.
        cluster: solved for, if there is no plan.
        plan: made from this profile; it brings its cluster and schedule.
        options: how to solve; by default as `solve` does.
        patience: how long all of it may take. When the time is over, the cost model prices the rest.

    Raises:
        PlanError: if the plan was made from another profile.
        InfeasibleError, InputError: as `solve`.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> [row.name for row in planner.compare(profile, plan=plan).rows][:2]
        ['chosen plan', 'data parallel']
    """
    if plan is None:
        if cluster is None:
            raise InputError("compare has no cluster to find a plan for", hint="give a `cluster`, or a `plan`")
        options = options or SolveOptions()
        patience = patience or Patience.of(options.time_limit_s, options.progress)
        given = GivenPlan.of(profile, find_plan(profile, cluster, options, patience.part(SOLVING)), options, patience)
    else:
        given = GivenPlan.of(profile, plan, patience=patience)
    ways = _ways(given)
    rows = [_row(given, way) for way in ways]
    parallel = next(row for row in rows if row.name == DATA_PARALLEL)
    fitting = [row for row in rows if row.name not in OWN and not row.over_memory_bytes]
    fastest_row = min(fitting, key=lambda row: row.seconds_per_microbatch, default=None)
    over = fastest_row if parallel.over_memory_bytes else parallel
    relative = tuple(_relative(row, over, parallel.communication_bytes) for row in rows)
    return Comparison(
        model=profile.model, cluster=given.plan.cluster, rows=relative, over=None if over is None else over.name
    )


def with_rows(plan: Plan, comparison: Comparison) -> Plan:
    """Return a plan without baselines with those of its comparison."""
    if plan.baselines:
        return plan
    ways = tuple(
        OtherWay(**{name: getattr(row, name) for name in OtherWay.model_fields})
        for row in comparison.rows
        if row.name not in OWN
    )
    return plan.model_copy(update={"baselines": ways})


def _ways(given: GivenPlan) -> list[Way]:
    """List the chosen plan, then what people use, then other pipelines made by hand."""
    layer_costs, plan, cluster = given.layer_costs, given.plan, given.plan.cluster
    options = replace(given.options, schedule=plan.schedule.unchunked)  # the baselines have no chunks
    deadline = given.patience.deadline
    problem = problem_of(options, layer_costs, cluster, Budget.unlimited(deadline))
    equal_time = baselines.equal_time(layer_costs, cluster.gpus)
    straight = fastest(problem, [*baselines.straight(layer_costs, cluster, deadline.earlier(STRAIGHT)), equal_time])
    assert straight is not None  # there is equal_time at least

    by_hand = {
        "equal layers": baselines.equal_layers(layer_costs, cluster.gpus),
        "equal parameters": baselines.equal_parameters(layer_costs, cluster.gpus),
        "equal time": equal_time,
    }
    ways = [
        Way(CHOSEN, given.problem, Evaluation(given.stages, given.price())),
        *usual_ways(given.options, layer_costs, cluster, Budget(deadline)),
        Way("straight pipeline", problem, straight),
        *(Way(name, problem, evaluate(problem, stages)) for name, stages in by_hand.items()),
    ]
    if plan.schedule is not GPIPE and not plan.schedule.chunked:
        microbatches = MICROBATCHES_PER_GPU * cluster.gpus
        drained = replace(options, schedule=GPIPE, microbatches=microbatches, minibatch=None, cost_model="resource")
        gpipe = problem_of(drained, layer_costs, cluster, Budget.unlimited(deadline))
        ways.append(Way(SAME_CUT, gpipe, evaluate(gpipe, given.stages)))
    return ways


def _row(given: GivenPlan, entry: Way) -> ComparisonRow:
    """Make a row that is not yet compared with another."""
    profile = given.layer_costs.profile
    size, tokens = profile.microbatch_size, profile.tokens_per_sample
    price, stages, microbatches = entry.plan.price, entry.plan.stages, entry.problem.microbatches
    seconds = entry.seconds_per_microbatch
    sent = price.communication_bytes / microbatches
    workers = entry.plan.gpus // price.chunks  # under interleaved each worker runs several stages
    busy = busy_s(given.layer_costs, stages, entry.problem.schedule, microbatches)
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
        staleness=max(map(entry.problem.schedule.staleness, price.in_flight)),
        idle_share=1 - busy / (workers * seconds),
        simulated=given.simulated if entry.name == CHOSEN else entry.plan.simulated,
    )


def busy_s(layer_costs: LayerCosts, stages: Sequence[Candidate], schedule: Schedule, microbatches: int) -> float:
    """Sum the seconds per microbatch that the workers of all stages compute.

    A microbatch runs on one replica of each stage. All replicas update: once per minibatch, or under 1f1b once per
    round of as many minibatches as there are replicas, which is one update per minibatch again.
    """
    total = 0.0
    for stage in stages:
        work = layer_costs.work(stage)
        updates = stage.replicas / microbatches if schedule.divides else 1
        # The first microbatch of each replica has no gradients to accumulate into.
        accumulating = max(0, microbatches - stage.replicas) / microbatches
        once_s = float(work.forward_s + work.recompute_s + work.backward_s)
        once_s += updates * float(work.update_s) / stage.options.shards
        once_s += accumulating * float(work.accumulate_s)
        total += stage.options.tensor * once_s  # all ranks of a group compute
    return total


def _relative(row: ComparisonRow, over: ComparisonRow | None, parallel_bytes: float) -> ComparisonRow:
    cut = 1 - row.communication_bytes / parallel_bytes if parallel_bytes > 0 else None
    speedup = None
    if over is not None and not row.over_memory_bytes:
        speedup = over.seconds_per_microbatch / row.seconds_per_microbatch
    return row.model_copy(update={"speedup": speedup, "communication_cut": cut})
