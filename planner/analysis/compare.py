"""Compare a plan with what one would do without a planner, on the same cluster and under the same
cost model.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal

from planner.analysis.given_plan import GivenPlan
from planner.arguments import checked
from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.utilisation import utilisation
from planner.formats.cluster import Cluster
from planner.formats.files import Record, replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay
from planner.formats.profile import Lengths, Profile
from planner.formats.shown import Shown
from planner.options.solving import TIME_LIMIT_S
from planner.schedule.instructions import MICROBATCHES_PER_GPU
from planner.schedule.one_stage import GPIPE
from planner.schedule.schedule import Schedule
from planner.solver.alternatives.usual_ways import DATA_PARALLEL, Way, usual_ways
from planner.solver.by_hand import equal_time
from planner.solver.clock import Clock
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.problem.result import Evaluation

CHOSEN = "chosen plan"
SAME_CUT = "gpipe, same cut"
# Ways to make batches of samples whose lengths vary, for the same stages.
ORDERS: Mapping[Literal["random", "buckets", "given"], str] = {
    "random": "in random order",
    "buckets": "in buckets",
}
PADDED = "padded to the longest"
PACKED = "packed"
# rows with stages that the planner chose
SAME_STAGES = (CHOSEN, SAME_CUT, *ORDERS.values(), PADDED, PACKED)


class ComparisonRow(OtherWay):
    """One way to train the model on the cluster. Times and bytes are per microbatch, which all rows
    have in common.
    """

    workers: int
    samples_per_s: float | None  # None if the profile does not know its batch size
    # over the way that the comparison names; None where no way fits, or this one does not
    speedup: float | None
    communication_bytes: float  # sent by all workers, per microbatch
    communication_bytes_per_sample: float | None
    # share of data parallel's bytes that is not sent; None if that sends none
    communication_cut: float | None
    tokens_per_s: float | None  # None where the model is not of token ids
    # of the workers' peak, by the model's FLOPs; None where one is not known
    flop_utilisation: float | None
    # of the workers' time: bubbles, waits, and communication that is not overlapped
    idle_share: float
    simulated: bool = True  # False: by the cost model, which knows no waiting


class Comparison(Shown, Record):
    """The chosen plan first, then the baselines."""

    model: str
    cluster: Cluster
    rows: tuple[ComparisonRow, ...]
    # What speed-ups are relative to: data parallelism; where that does not fit, the fastest
    # baseline that does.
    over: str | None = DATA_PARALLEL


@checked
def compare(profile: Profile, plan: Plan, *, clock: Clock | None = None) -> Comparison:
    """Compare a plan with data parallelism, plain and sharded, hand-made pipelines, and GPipe on
    the same cut.

    All rows have the plan's samples per update, except under 1f1b, where each row says its own.

    Args:
        profile: costs per layer.
        plan: made from this profile; it brings its cluster and schedule.
        clock: how long all of it may take. When the time is over, the cost model prices the rest.

    Raises:
        PlanError: if the plan was made from another profile.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> [row.name for row in planner.compare(profile, plan).rows][:2]
        ['chosen plan', 'data parallel']
    """
    given = GivenPlan.of(profile, plan, clock or Clock.of(TIME_LIMIT_S))
    rows = [_row(given, way) for way in _ways(given)]
    parallel = next(row for row in rows if row.name == DATA_PARALLEL)
    over = _reference(rows, parallel)
    return Comparison(
        model=profile.model,
        cluster=given.plan.cluster,
        rows=tuple(_related(row, parallel, over) for row in rows),
        over=None if over is None else over.name,
    )


def _reference(rows: Sequence[ComparisonRow], parallel: ComparisonRow) -> ComparisonRow | None:
    """Return the row that speed-ups are relative to; None where nothing but the plan fits."""
    if not parallel.over_memory_bytes:
        return parallel
    fitting = [row for row in rows if row.name not in SAME_STAGES and not row.over_memory_bytes]
    return min(fitting, key=lambda row: row.seconds_per_microbatch, default=None)


def _related(
    row: ComparisonRow, parallel: ComparisonRow, over: ComparisonRow | None
) -> ComparisonRow:
    """Return the row with its speed-up, and with the share of data parallel's bytes that it does
    not send.
    """
    cut = None
    if parallel.communication_bytes > 0:
        cut = 1 - row.communication_bytes / parallel.communication_bytes
    speedup = None
    if over is not None and not row.over_memory_bytes:
        speedup = over.seconds_per_microbatch / row.seconds_per_microbatch
    return replace(row, speedup=speedup, communication_cut=cut)


def _ways(given: GivenPlan) -> Iterator[Way]:
    """Yield the chosen plan, what people use, a pipeline of equal times, and GPipe with the plan's
    stages.
    """
    request = given.request
    yield Way(CHOSEN, given.problem, Evaluation(given.stages, given.price()))
    yield from usual_ways(request, request.budget())

    # the baselines have no chunks
    schedule = given.plan.schedule.unchunked
    unchunked = request.with_options(replace(request.options, schedule=schedule))
    stages = equal_time(given.layer_costs, request.cluster.gpus)
    problem = unchunked.problem(request.unlimited_budget())
    balanced = evaluate(problem, stages)
    if problem.runs_versions(balanced):
        yield Way("equal time", problem, balanced)

    yield from _same_cut(given)
    yield from _of_lengths(given)


def _same_cut(given: GivenPlan) -> Iterator[Way]:
    """Yield GPipe with the plan's stages, and its minibatch where the plan's schedule
    divides one.
    """
    plan = given.plan
    request = given.request
    if plan.schedule is GPIPE or plan.schedule.chunked:
        return

    microbatches = MICROBATCHES_PER_GPU * plan.cluster.gpus
    if plan.schedule.divides:
        microbatches = plan.microbatches
    drained = request.under(GPIPE, microbatches)
    problem = drained.problem(request.unlimited_budget())
    yield Way(SAME_CUT, problem, evaluate(problem, given.stages))


def _of_lengths(given: GivenPlan) -> Iterator[Way]:
    """Yield the plan's stages with other batches, where lengths vary; packed rows are as long as
    the longest sample.
    """
    lengths = given.request.profile.lengths
    if lengths is None:
        return

    for order, name in ORDERS.items():
        if order != lengths.order:
            yield _with_lengths(given, name, replace(lengths, order=order))

    yield _with_lengths(given, PADDED, None)

    means = zip(map(fmean, lengths.samples), lengths.most, strict=True)
    packed = _with_lengths(given, PACKED, None)
    yield replace(packed, part=max(mean / most for mean, most in means))


def _with_lengths(given: GivenPlan, name: str, lengths: Lengths | None) -> Way:
    profile = replace(given.request.profile, lengths=lengths)
    request = replace(given.request, profile=profile)
    problem = request.problem(request.unlimited_budget())
    return Way(name, problem, evaluate(problem, given.stages))


def _row(given: GivenPlan, way: Way) -> ComparisonRow:
    profile = given.layer_costs.profile
    price = way.plan.price
    problem = way.problem
    size = profile.microbatch_size
    tokens = profile.tokens_per_sample
    seconds = way.seconds_per_microbatch

    sent = way.part * price.communication_bytes / problem.microbatches
    workers = way.plan.gpus // price.chunks  # under interleaved each worker runs several stages
    computing_s = busy_s(
        problem.layer_costs, way.plan.stages, problem.schedule, problem.microbatches
    )
    used = None
    if not given.plan.cluster.kinds:
        used = utilisation(profile, 1, seconds, workers)

    return ComparisonRow(
        **dict(way.described()),
        workers=workers,
        samples_per_s=None if size is None else size / seconds,
        speedup=None,
        communication_bytes=sent,
        communication_bytes_per_sample=None if size is None else sent / size,
        communication_cut=None,
        tokens_per_s=None if size is None or tokens is None else size * tokens / seconds,
        flop_utilisation=used,
        idle_share=1 - way.part * computing_s / (workers * seconds),
        simulated=given.simulated if way.name == CHOSEN else way.plan.simulated,
    )


def busy_s(
    layer_costs: LayerCosts, stages: Sequence[Candidate], schedule: Schedule, microbatches: int
) -> float:
    """Sum the seconds per microbatch that the workers of all stages compute."""
    total = 0.0
    for stage in stages:
        work = layer_costs.work(stage)

        # All replicas update: once per minibatch, or under 1f1b once per round of as many
        # minibatches as replicas.
        updates = stage.replicas / microbatches if schedule.divides else 1

        # The first microbatch of each replica has no gradients to accumulate into.
        accumulating = max(0, microbatches - stage.replicas) / microbatches
        once_s = float(work.forward_s + work.recompute_s + work.backward_s)
        once_s += updates * float(work.update_s) / stage.options.shards
        once_s += accumulating * float(work.accumulate_s)
        total += stage.options.ranks_per_replica * once_s  # all ranks of a group compute

    return total
