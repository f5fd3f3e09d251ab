"""The tables of a plan: its stages, and what to expect of it."""

from __future__ import annotations

from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.plan import GIVEN, Plan
from planner.formats.plan_parts import Bottleneck, SolverReport, Stage, short_config
from planner.formats.profile import Profile
from planner.report.tables.memory import memory_table
from planner.report.tables.repeats import layer_range
from planner.report.tables.table import Table, named_values
from planner.report.tables.ways import best_baseline_line, share_of_speed, speed_up_line, synchronous_line
from planner.schedule.instructions import LATE_UPDATES, MOMENTUM_UPDATES
from planner.units import format_bandwidth, format_bytes, format_memory, format_rate, format_seconds, times_words

MOST_RUNS = 4  # of consecutive ranks of a stage that are listed one by one
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


def late_updates(plan: Plan) -> list[int]:
    """List how many updates late each stage's gradients are."""
    late = plan.staleness
    return [late if plan.vertical_sync else plan.schedule.staleness(stage.in_flight) for stage in plan.stages]


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


def stage_table(plan: Plan) -> Table:
    """Tabulate the stages; columns in which nothing is to be said are left out."""
    headers = [
        "stage",
        "layers",
        "replicas",
        "of ranks",
        "ranks",
        "GPU",
        "in flight",
        "late",
        "compute",
        "accumulation",
        "sends",
    ]
    headers += ["optimizer", "recomputes"]
    late = late_updates(plan)
    model = [name for stage in plan.stages for name in stage.layers]
    rows = [
        [
            number,
            layer_range(stage.layers, model),
            stage.replicas,
            stage.tensor,
            ranks_line(stage),
            plan.cluster.kinds_on(stage.ranks),
            stage.in_flight,
            late[number],
            format_seconds(stage.compute_s),
            format_seconds(stage.accumulate_s),
            format_bytes(sum(sent_bytes(plan, number))),
            f"1/{stage.replicas}" if stage.sharded else "whole",
            recomputing(stage) or "nothing",
        ]
        for number, stage in enumerate(plan.stages)
    ]
    table = Table(headers, rows)
    if not any(late):
        table = table.without("late")
    # A replica's first backward after an update has no gradients to accumulate into, so one microbatch never does.
    if plan.microbatches == 1 or not any(stage.accumulate_s for stage in plan.stages):
        table = table.without("accumulation")
    if not any(stage.sharded for stage in plan.stages):
        table = table.without("optimizer")
    if not plan.cluster.kinds:
        table = table.without("GPU")
    if max(plan.degrees) == 1:
        table = table.without("of ranks")
    return table if any(stage.recomputes for stage in plan.stages) else table.without("recomputes")


def recomputing(stage: Stage) -> str:
    """Return what of a stage recomputes, in words; empty for nothing."""
    if stage.recompute is True:
        return "all layers"
    groups, again = len(stage.recompute_groups), sum(map(len, stage.recompute_groups))
    if again <= groups:
        return f"{again} layer{'s' * (again > 1)}" if again else ""
    return f"{groups} block{'s' * (groups > 1)}, {again} layers"


def ranks_line(stage: Stage) -> str:
    """Write the ranks in ascending order: "0-3", "0, 2", or of many runs the first and the last: "0-1, 4-5, ...".

    Two consecutive ranks are a run among several of the same length only: "0, 1" alone.
    """
    runs: list[list[int]] = []
    for rank in sorted(stage.ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    least = 2 if len(runs) > 1 else 3
    words = [f"{run[0]}-{run[-1]}" if len(run) >= least else ", ".join(map(str, run)) for run in runs]
    if len(words) > MOST_RUNS:
        words = [*words[:2], "...", words[-1]]
    return ", ".join(words)


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


def sent_bytes(plan: Plan, stage: int) -> tuple[int, int]:
    """Sum what a stage sends per microbatch: activations forward and gradients back."""
    forward = sum(transfer.output_bytes for transfer in plan.transfers if transfer.source == stage)
    back = sum(transfer.gradient_bytes for transfer in plan.transfers if transfer.target == stage)
    return forward, back


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
