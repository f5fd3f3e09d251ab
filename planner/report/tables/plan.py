"""The report of a plan: what it runs on, what to expect of it, and how it compares with other ways to train.

A way that does not fit the memory has no ratio to the plan.
"""

from __future__ import annotations

from planner.analysis.usual_ways import DATA_PARALLEL, ONE_GPU
from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.plan import GIVEN, Plan
from planner.formats.plan_parts import Bottleneck, OtherWay, SolverReport, short_config
from planner.formats.profile import Profile
from planner.report.tables.stages import memory_table, stage_table
from planner.report.tables.table import Table, named_values
from planner.schedule.instructions import LATE_UPDATES, MOMENTUM_UPDATES
from planner.units import (
    format_bandwidth,
    format_bytes,
    format_memory,
    format_rate,
    format_seconds,
    format_times,
    times_words,
)

NO_OVERLAP = "The workers compute on every core, so messages take time from the computation and do not overlap with it."


def cluster_report(cluster: Cluster) -> str:
    """List the levels, inner to outer."""
    rows = [
        [
            index,
            level.size,
            format_bandwidth(level.bandwidth_bytes_per_s),
            format_seconds(level.latency_s),
            format_bandwidth(level.all_reduce_bandwidth_bytes_per_s or level.bandwidth_bytes_per_s),
        ]
        for index, level in enumerate(cluster.levels)
    ]
    table = Table(["level", "members", "bandwidth", "latency", "all-reduce"], rows).text()
    return table if cluster.overlap else f"{table}\n\n{NO_OVERLAP}"


def over_one_gpu(plan: Plan) -> str:
    """Write the speed-up over one GPU: "1.86x"; or that the model does not fit one."""
    return speed_over(plan.predicted.speedup_over_one_gpu, plan.over_memory_bytes(ONE_GPU))


def over_data_parallel(plan: Plan) -> str:
    """Write the speed-up over data parallelism, or that it does not fit."""
    return speed_over(plan.predicted.speedup_over_data_parallel, plan.over_memory_bytes(DATA_PARALLEL))


def speed_over(ratio: float | None, over_memory_bytes: int) -> str:
    """Write a speed-up: "1.86x"; nothing where it is None; or that one of the two ways does not fit the memory."""
    if over_memory_bytes:
        return f"does not fit ({format_bytes(over_memory_bytes)} too many)"
    return "" if ratio is None else format_times(ratio)


def speed_up_line(plan: Plan, gpus: str) -> str:
    """Write both; `gpus`: on how many GPUs data parallelism runs."""
    if over := max(map(plan.lacking_bytes, range(len(plan.stages)))):
        return f"none: the plan {speed_over(None, over)}"
    one, parallel = over_one_gpu(plan), over_data_parallel(plan)
    over_one = f"{one} over one GPU" if one.endswith("x") else f"one GPU {one}"
    over_parallel = (
        f"{parallel} over data parallel on {gpus}" if parallel.endswith("x") else f"data parallel {parallel}"
    )
    return f"{over_one}, {over_parallel}"


def best_baseline_line(plan: Plan) -> str | None:
    """Compare the plan with the fastest baseline that fits; None where data parallelism is that, or none is known."""
    fitting = [way for way in plan.baselines if not way.over_memory_bytes]
    best = min(fitting, key=lambda way: way.seconds_per_microbatch, default=None)
    if best is None:
        return "none of them fits the memory" if plan.baselines else None
    if best.name == DATA_PARALLEL:
        return None
    ratio, name = _ratio(plan, best), f"{best.name} ({short_config(best.config)})"
    if ratio < 1:
        return f"{name} fits and is faster: the plan is {times_words(ratio)} as fast"
    times = format_times(ratio)
    return f"{'as fast as' if times == '1.00x' else f'{times} over'} the fastest other way that fits, {name}"


def synchronous_line(plan: Plan) -> str | None:
    """Say what the best synchronous plan would give; None where that was not searched for."""
    way = plan.synchronous
    if way is None:
        return None
    each_s, size = way.seconds_per_microbatch, plan.microbatch_size
    pace = f"{format_seconds(each_s)} per microbatch" if size is None else f"{format_rate(size / each_s)} samples/s"
    name, share = f"{way.schedule} {short_config(way.config)}", share_of_speed(plan, way)
    return f"{name}, whose gradients are never late: {pace}, {times_words(share)} as fast"


def share_of_speed(plan: Plan, way: OtherWay) -> float:
    """Return how many times as fast as the plan another way is."""
    return 1 / _ratio(plan, way)


def _ratio(plan: Plan, way: OtherWay) -> float:
    """Return how many times as fast as another way the plan is."""
    return way.seconds_per_microbatch / (plan.predicted.seconds_per_minibatch / plan.microbatches)


_RESOURCES = {
    "compute": "the computation of stage {stage}",
    "link": "the link of stage {stage}",
    "shared_link": "the link of stage {stage}'s server",
    "boundary": "the transfer after stage {stage}",
}


def plan_report(plan: Plan) -> str:
    """Report the plan, its stages and its prediction."""
    notes = [f"note: {note}" for note in plan.notes]
    return "\n\n".join((_head(plan), stage_table(plan).text(), memory_table(plan).text(), _prediction(plan), *notes))


def _head(plan: Plan) -> str:
    unused = plan.cluster.gpus - plan.workers
    # Only a plan that is proven optimal knows what the unused GPUs would do.
    verdict = "would not make it faster" if plan.solver.status == "optimal" else "are not used"
    spare = f" ({unused} of {plan.cluster.gpus} GPUs {verdict})" if unused else ""
    lines = [
        ("model", plan.model),
        ("plan", f"{short_config(plan.config)} on {plan.workers} GPU{'s' * (plan.workers > 1)}{spare}"),
        ("schedule", schedule_line(plan)),
        ("gradients", staleness_line(plan)),
        ("cluster", cluster_line(plan.cluster)),
    ]
    if plan.device.name != "unknown":
        lines.append(("device", f"{plan.device.name} ({plan.device.kind})"))
    if words := options_words(plan):
        lines.append(("stages run", words))
    return named_values(lines)


def schedule_line(plan: Plan) -> str:
    """Describe the schedule."""
    if plan.vertical_sync:
        return f"{plan.schedule.title} and vertical sync"
    if len(plan.stages) == 1 and plan.schedule.stashes:
        return f"{plan.schedule}, which with one stage is data parallelism" if plan.workers > 1 else "one stage"
    return plan.schedule.title.format(microbatches=plan.microbatches, chunks=plan.chunks)


def staleness_line(plan: Plan) -> str:
    """Say how many updates late the gradients are."""
    late = plan.staleness
    if late == 0:
        return "of the current weights"
    updates = f"up to {late} update{'s' * (late > 1)} late"
    if late > LATE_UPDATES:
        return f"{updates}: TRAINING MAY NOT CONVERGE"
    return f"{updates}, at the first stage" + ("; train with little momentum" if late >= MOMENTUM_UPDATES else "")


def staleness_warning(plan: Plan) -> tuple[str, str] | None:
    """Return a warning and a hint for a plan whose gradients are late for nothing, or many updates; None for others."""
    hint = f"bound it with `max_staleness={LATE_UPDATES}`, or choose a synchronous `schedule`"
    if (way := plan.synchronous) is not None and plan.staleness and (share := share_of_speed(plan, way)) > 1:
        return (
            f"the best plan under {way.schedule} is {times_words(share)} as fast, and none of its gradients is late",
            f"solve with `schedule={way.schedule}`",
        )
    if plan.staleness <= LATE_UPDATES:
        return None
    late = f"gradients are up to {plan.staleness} updates late"
    return f"{late}, at which many models converge slowly or not at all", hint


def cluster_line(cluster: Cluster) -> str:
    """Describe the cluster: sizes, rates and memory."""
    levels = ", ".join(
        f"{level.size} at {format_bandwidth(level.bandwidth_bytes_per_s)}"
        + (f" and {format_seconds(level.latency_s)} latency" if level.latency_s else "")
        for level in cluster.levels
    )
    if cluster.compress != "none":
        levels += f", activations sent as {cluster.compress}"
    if cluster.sequence_parallel:
        levels += ", sequence parallelism in groups that divide layers (priced, not trained)"
    if cluster.kinds:
        return f"{levels}: {'; '.join(_kind(cluster, kind) for kind in cluster.kinds)}"
    measured = f", measured over {cluster.backend}" if cluster.backend is not None else ""
    return f"{levels}, {_memory(cluster.memory_bytes)}{measured}"


def _kind(cluster: Cluster, kind: DeviceKind) -> str:
    measured = "" if kind.device is None else f" ({kind.device})"
    of = "of " if kind.name is None else ""
    return f"{kind.count} {of}{kind.title}{measured}, {_memory(cluster.memory_of(kind))}"


def _memory(limit: int | None) -> str:
    return "no memory limit" if limit is None else f"{format_memory(limit)} each"


def options_words(record: Profile | Plan) -> str:
    """List the options that are set: "autocast to bfloat16, channels-last, compiled"; empty without any."""
    autocast = f"autocast to {record.autocast}" if record.autocast else None
    flags = {"TF32": record.tf32, "compiled": record.compiled, "deterministic": record.deterministic}
    words = (autocast, record.memory_format, *(word for word, is_set in flags.items() if is_set))
    return ", ".join(word for word in words if word)


def gpus(plan: Plan) -> str:
    """Write how many GPUs the cluster has: "1 GPU"."""
    count = plan.cluster.gpus
    return f"{count} GPU{'s' * (count > 1)}"


def _prediction(plan: Plan) -> str:
    predicted, solver = plan.predicted, plan.solver
    limit = predicted.bottleneck
    beside = {"baselines": best_baseline_line(plan), "synchronous": synchronous_line(plan)}
    tokens = "" if predicted.tokens_per_s is None else f"{format_rate(predicted.tokens_per_s)} tokens/s, "
    lines = [
        ("predicted", f"{tokens}{pace(predicted.samples_per_s, predicted.seconds_per_minibatch)}, {_by(plan)}"),
        ("limited by", f"{bottleneck_place(limit)}, busy {format_seconds(limit.busy_s)} per minibatch"),
        ("speed-up", speed_up_line(plan, gpus(plan))),
        *((name, line) for name, line in beside.items() if line is not None),
        ("communication", _communication(plan)),
        ("solver", _solver(plan)),
    ]
    if predicted.by == "simulation" and solver.status != "optimal" and solver.name != GIVEN:
        lines += [("bound", _bound(plan)), ("candidate", simulated_words(solver))]
    if predicted.flop_utilisation is not None:
        lines.insert(1, ("utilisation", f"{predicted.flop_utilisation:.1%} of the GPUs' peak, by the model's FLOPs"))
    if solver.cost_model != "resource":
        lines.insert(1, ("cost model", f"{solver.cost_model}, as published"))
    return named_values(lines)


def pace(samples_per_s: float | None, seconds_per_minibatch: float) -> str:
    """Write samples per second, if they are known, and the time of a minibatch."""
    seconds = f"{format_seconds(seconds_per_minibatch)} per minibatch"
    return seconds if samples_per_s is None else f"{format_rate(samples_per_s)} samples/s, {seconds}"


def bottleneck_place(bottleneck: Bottleneck) -> str:
    """Name the resource that limits the plan: "the link of stage 2"."""
    return _RESOURCES[bottleneck.resource].format(stage=bottleneck.stage)


def _communication(plan: Plan) -> str:
    predicted = plan.predicted
    parts = []
    if predicted.communication_bytes_per_sample is not None:
        parts.append(f"{format_bytes(predicted.communication_bytes_per_sample)} per sample")
    if predicted.data_parallel_communication_bytes_per_sample is not None:
        parts.append(f"data parallel {format_bytes(predicted.data_parallel_communication_bytes_per_sample)}")
    if predicted.communication_cut is not None:
        parts.append(f"{less_or_more(predicted.communication_cut)} than data parallel")
    return ", ".join(parts) or "none"


def less_or_more(cut: float) -> str:
    """Write a cut as "96% less", or a negative one as "4% more"; beyond ten times as much, digits say nothing."""
    if cut < -10:
        return "over 1,000% more"
    return f"{abs(cut):.0%} {'less' if cut >= 0 else 'more'}"


def _solver(plan: Plan) -> str:
    solver = plan.solver
    if solver.name == GIVEN:
        return "none: the stages were given"
    if solver.status == "optimal":
        quality = "optimal"
    elif plan.predicted.by == "cost model":
        quality = f"feasible, at most {solver.gap:.1%} from optimal"
    else:
        quality = "feasible"
    return f"{quality}, {solver.name} in {format_seconds(solver.seconds)}"


def _by(plan: Plan) -> str:
    """Say what the prediction comes from, and why it is no simulation where one would be expected."""
    if plan.predicted.by == "simulation":
        return "simulated"
    if plan.solver.cost_model == "resource":
        why = "too large to simulate" if plan.solver.exhausted else "the time limit left no time to simulate it"
        return f"by the cost model: {why}"
    return "by the cost model"


def _bound(plan: Plan) -> str:
    """Say what no plan is below by the cost model."""
    solver = plan.solver
    least = format_seconds(solver.lower_bound_s)
    return f"by the cost model no plan takes less than {least}, which is {solver.gap:.1%} less"


def simulated_words(solver: SolverReport) -> str:
    """Say which of the candidates that were simulated the plan is."""
    count = solver.simulated
    if solver.exhausted:
        which = "the only candidate" if count == 1 else f"the fastest of {count} candidates that were simulated"
        return f"{which}; by the cost model no other could be faster"
    some = "the only candidate" if count == 1 else f"the fastest of the {count} candidates"
    return f"{some} that there was time to simulate; others could be faster"
