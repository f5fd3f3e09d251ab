"""The report of a plan: what it runs on, what to expect of it, and how it compares with other ways to train.

A way that does not fit the memory has no ratio to the plan.
"""

from __future__ import annotations

from planner.analysis.usual_ways import DATA_PARALLEL, ONE_GPU
from planner.formats.cluster import Cluster
from planner.formats.plan import GIVEN, Plan
from planner.formats.plan_parts import Bottleneck, OtherWay, SolverReport, short_config
from planner.formats.profile import Profile
from planner.reporting.tables.stages import memory_table, stage_table
from planner.reporting.tables.table import named_values, table_of
from planner.schedule.instructions import LATE_UPDATES, MOMENTUM_UPDATES
from planner.units import (
    as_fast,
    format_bandwidth,
    format_bytes,
    format_memory,
    format_rate,
    format_seconds,
    format_times,
)

NO_OVERLAP = "The workers compute on every core, so messages take time from the computation and do not overlap with it."
_RESOURCES = {
    "compute": "the computation of stage {stage}",
    "link": "the link of stage {stage}",
    "shared_link": "the link of stage {stage}'s server",
    "boundary": "the transfer after stage {stage}",
}


def plan_report(plan: Plan) -> str:
    """Report the plan, its stages and its prediction."""
    tables = stage_table(plan).text(), memory_table(plan).text()
    notes = [f"note: {note}" for note in plan.notes]
    return "\n\n".join((named_values(_head(plan)), *tables, named_values(prediction_lines(plan)), *notes))


def cluster_report(cluster: Cluster) -> str:
    """List the levels, inner to outer."""
    rows = [
        {
            "level": number,
            "members": level.size,
            "bandwidth": format_bandwidth(level.bandwidth_bytes_per_s),
            "latency": format_seconds(level.latency_s),
            "all-reduce": format_bandwidth(level.all_reduce_bandwidth_bytes_per_s or level.bandwidth_bytes_per_s),
        }
        for number, level in enumerate(cluster.levels)
    ]
    return table_of(rows).text() + ("" if cluster.overlap else f"\n\n{NO_OVERLAP}")


def _head(plan: Plan) -> list[tuple[str, str | None]]:
    unused = plan.cluster.gpus - plan.workers
    # Only a plan that is proven optimal knows what the unused GPUs would do.
    verdict = "would not make it faster" if plan.solver.status == "optimal" else "are not used"
    spare = f" ({unused} of {plan.cluster.gpus} GPUs {verdict})" if unused else ""
    return [
        ("model", plan.model),
        ("plan", f"{short_config(plan.config)} on {gpus(plan.workers)}{spare}"),
        ("schedule", schedule_line(plan)),
        ("gradients", staleness_line(plan)),
        ("cluster", cluster_line(plan.cluster)),
        ("device", f"{plan.device.name} ({plan.device.kind})" if plan.device.name != "unknown" else None),
        ("stages run", options_words(plan)),
    ]


def prediction_lines(plan: Plan) -> list[tuple[str, str | None]]:
    """Name what is predicted of a plan, and say it; None where nothing is to be said."""
    predicted, solver = plan.predicted, plan.solver
    limit, used = predicted.bottleneck, predicted.flop_utilisation
    busy = f"{format_seconds(limit.busy_s)} per minibatch by the cost model"
    simulated = predicted.by == "simulation" and solver.status != "optimal" and solver.name != GIVEN
    return [
        ("predicted", f"{speed(plan)}, {_by(plan)}"),
        ("cost model", f"{solver.cost_model}, as published" if solver.cost_model != "resource" else None),
        ("utilisation", f"{used:.1%} of the GPUs' peak, by the model's FLOPs" if used is not None else None),
        ("limited by", f"{bottleneck_place(limit)}, {busy}"),
        ("speed-up", _speed_up(plan)),
        ("baselines", best_baseline_line(plan)),
        ("synchronous", _synchronous(plan)),
        ("communication", _communication(plan)),
        ("solver", _solver(plan)),
        ("bound", bound_words(solver) if simulated else None),
        ("candidate", simulated_words(solver) if simulated else None),
    ]


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
    if (way := plan.synchronous) is not None and plan.staleness and (share := share_of_speed(plan, way)) > 1:
        faster = f"the best plan under {way.schedule} is {as_fast(share)}"
        return f"{faster}, and none of its gradients is late", f"solve with `schedule={way.schedule}`"
    if plan.staleness <= LATE_UPDATES:
        return None
    late = f"gradients are up to {plan.staleness} updates late, at which many models converge slowly or not at all"
    return late, f"bound it with `max_staleness={LATE_UPDATES}`, or choose a synchronous `schedule`"


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
    if not cluster.kinds:
        measured = f", measured over {cluster.backend}" if cluster.backend is not None else ""
        return f"{levels}, {_memory(cluster.memory_bytes)}{measured}"
    kinds = [
        f"{kind.count} {'of ' if kind.name is None else ''}{kind.title}"
        f"{'' if kind.device is None else f' ({kind.device})'}, {_memory(cluster.memory_of(kind))}"
        for kind in cluster.kinds
    ]
    return f"{levels}: {'; '.join(kinds)}"


def _memory(limit: int | None) -> str:
    return "no memory limit" if limit is None else f"{format_memory(limit)} each"


def options_words(record: Profile | Plan) -> str | None:
    """List the options that are set: "autocast to bfloat16, channels-last, compiled"; None without any."""
    autocast = f"autocast to {record.autocast}" if record.autocast else None
    flags = {"TF32": record.tf32, "compiled": record.compiled, "deterministic": record.deterministic}
    words = (autocast, record.memory_format, *(word for word, is_set in flags.items() if is_set))
    return ", ".join(word for word in words if word) or None


def speed(plan: Plan) -> str:
    """Write the predicted tokens and samples per second, as far as they are known, and the time of a minibatch."""
    predicted = plan.predicted
    tokens = "" if predicted.tokens_per_s is None else f"{format_rate(predicted.tokens_per_s)} tokens/s, "
    return tokens + pace(predicted.samples_per_s, predicted.seconds_per_minibatch)


def pace(samples_per_s: float | None, seconds_per_minibatch: float) -> str:
    """Write samples per second, if they are known, and the time of a minibatch."""
    seconds = f"{format_seconds(seconds_per_minibatch)} per minibatch"
    return seconds if samples_per_s is None else f"{format_rate(samples_per_s)} samples/s, {seconds}"


def _by(plan: Plan) -> str:
    """Say what the prediction comes from, and why it is no simulation where one would be expected."""
    if plan.predicted.by == "simulation":
        return "simulated"
    if plan.solver.cost_model != "resource":
        return "by the cost model"
    why = "too large to simulate" if plan.solver.exhausted else "the time limit left no time to simulate it"
    return f"by the cost model: {why}"


def bottleneck_place(bottleneck: Bottleneck) -> str:
    """Name the resource that limits the plan: "the link of stage 2"."""
    return _RESOURCES[bottleneck.resource].format(stage=bottleneck.stage)


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


def _speed_up(plan: Plan) -> str:
    if over := max(map(plan.lacking_bytes, range(len(plan.stages)))):
        return f"none: the plan {speed_over(None, over)}"
    ways = (
        ("one GPU", over_one_gpu(plan), ""),
        ("data parallel", over_data_parallel(plan), f" on {gpus(plan.cluster.gpus)}"),
    )
    parts = (f"{text} over {way}{where}" if text.endswith("x") else f"{way} {text}" for way, text, where in ways)
    return ", ".join(parts)


def best_baseline_line(plan: Plan) -> str | None:
    """Compare the plan with the fastest baseline that fits; None where data parallelism is that, or none is known."""
    fitting = [way for way in plan.baselines if not way.over_memory_bytes]
    best = min(fitting, key=lambda way: way.seconds_per_microbatch, default=None)
    if best is None:
        return "none of them fits the memory" if plan.baselines else None
    if best.name == DATA_PARALLEL:
        return None
    ratio, name = 1 / share_of_speed(plan, best), f"{best.name} ({short_config(best.config)})"
    times = format_times(ratio)
    if ratio < 1 and times != "1.00x":
        return f"{name} fits and is faster: the plan is {as_fast(ratio)}"
    return f"{'as fast as' if times == '1.00x' else f'{times} over'} the fastest other way that fits, {name}"


def _synchronous(plan: Plan) -> str | None:
    """Say what the best synchronous plan would give; None where that was not searched for."""
    if (way := plan.synchronous) is None:
        return None
    each_s, size = way.seconds_per_microbatch, plan.microbatch_size
    rate = f"{format_seconds(each_s)} per microbatch" if size is None else f"{format_rate(size / each_s)} samples/s"
    name, times = f"{way.schedule} {short_config(way.config)}", as_fast(share_of_speed(plan, way))
    return f"{name}, whose gradients are never late: {rate}, {times}"


def share_of_speed(plan: Plan, way: OtherWay) -> float:
    """Return how many times as fast as the plan another way is."""
    return plan.predicted.seconds_per_minibatch / plan.microbatches / way.seconds_per_microbatch


def gpus(count: int) -> str:
    """Write a number of GPUs: "1 GPU"."""
    return f"{count} GPU{'s' * (count > 1)}"


def _communication(plan: Plan) -> str:
    predicted = plan.predicted
    own, theirs = predicted.communication_bytes_per_sample, predicted.data_parallel_communication_bytes_per_sample
    parts = [
        f"{format_bytes(own)} per sample" if own is not None else "",
        f"data parallel {format_bytes(theirs)}" if theirs is not None else "",
        f"{less_or_more(cut)} than data parallel" if (cut := predicted.communication_cut) is not None else "",
    ]
    return ", ".join(filter(None, parts)) or "none"


def less_or_more(cut: float) -> str:
    """Write a cut as "96% less", or a negative one as "4% more"; beyond ten times as much, digits say nothing."""
    if cut < -10:
        return "over 1,000% more"
    return f"{abs(cut):.0%} {'less' if cut >= 0 else 'more'}"


def _solver(plan: Plan) -> str:
    solver = plan.solver
    if solver.name == GIVEN:
        return "none: the stages were given"
    optimal = "optimal" if solver.status == "optimal" else "feasible"
    if optimal == "feasible" and plan.predicted.by == "cost model":
        optimal += f", at most {solver.gap:.1%} from optimal"
    return f"{optimal}, {solver.name} in {format_seconds(solver.seconds)}"


def bound_words(solver: SolverReport) -> str:
    """Say what no plan is below by the cost model."""
    least = format_seconds(solver.lower_bound_s)
    return f"by the cost model no plan takes less than {least}, which is {solver.gap:.1%} less"


def simulated_words(solver: SolverReport) -> str:
    """Say which of the candidates that were simulated the plan is."""
    which = "the only candidate" if solver.simulated == 1 else f"the fastest of {solver.simulated} candidates"
    others = "by the cost model no other" if solver.exhausted else "with more time to simulate others"
    return f"{which} in simulation; {others} could be faster"
