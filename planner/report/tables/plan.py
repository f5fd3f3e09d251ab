"""A plan for people."""

from __future__ import annotations

from tabulate import tabulate

from planner.formats.cluster import Cluster, Kind
from planner.formats.plan import Plan, Stage
from planner.report.tables.options import options_words
from planner.units import format_bandwidth, format_bytes, format_rate, format_seconds

RESOURCES = {
    "compute": "the computation of stage {stage}",
    "link": "the link of stage {stage}",
    "shared_link": "the link of stage {stage}'s server",
    "boundary": "the transfer after stage {stage}",
}
_SCHEDULES = {
    "1f1b": "1f1b with weight stashing",
    "2bw": "2bw, two weight versions, {microbatches} microbatches per minibatch",
    "1f1b-flush": "1f1b-flush, {microbatches} microbatches per minibatch",
    "zb-h1": "zb-h1, backwards in two parts, {microbatches} microbatches per minibatch",
    "gpipe": "gpipe, {microbatches} microbatches per minibatch",
    "interleaved": "interleaved, {chunks} chunks per GPU, {microbatches} microbatches per minibatch",
    "naive": "naive, one minibatch at a time",
}


def plan_report(plan: Plan) -> str:
    """What the plan is, stage by stage, and what to expect of it."""
    return "\n\n".join((_head(plan), _stage_table(plan), _prediction(plan)))


def _head(plan: Plan) -> str:
    unused = plan.cluster.gpus - plan.workers
    spare = f" ({unused} of {plan.cluster.gpus} GPUs would not make it faster)" if unused else ""
    lines = [
        ("model", plan.model),
        ("plan", f"{plan.config} on {plan.workers} GPU{'s' * (plan.workers > 1)}{spare}"),
        ("schedule", schedule_line(plan)),
        ("cluster", cluster_line(plan.cluster)),
    ]
    if words := options_words(plan):
        lines.append(("stages run", words))
    return tabulate(lines, tablefmt="plain", disable_numparse=True)


def schedule_line(plan: Plan) -> str:
    """The schedule, and what there is to say about it."""
    if plan.solver.cost_model == "max-load":
        return "none: max-load counts what each GPU does, in whatever order"
    if plan.vertical_sync:
        return "1f1b with weight stashing and vertical sync"
    return _SCHEDULES[plan.schedule].format(microbatches=plan.microbatches, chunks=plan.chunks)


def cluster_line(cluster: Cluster) -> str:
    """Sizes, rates and memory."""
    levels = ", ".join(
        f"{level.size} at {format_bandwidth(level.bandwidth_bytes_per_s)}"
        + (f" and {format_seconds(level.latency_s)} latency" if level.latency_s else "")
        for level in cluster.levels
    )
    if cluster.kinds:
        return f"{levels}: {'; '.join(_kind(cluster, kind) for kind in cluster.kinds)}"
    return f"{levels}, {_memory(cluster.memory_bytes)}"


def _kind(cluster: Cluster, kind: Kind) -> str:
    return f"{kind.count} of speed {kind.speed:g}, {_memory(cluster.memory_of(kind))}"


def _memory(limit: int | None) -> str:
    return "no memory limit" if limit is None else f"{format_bytes(limit)} each"


def _stage_table(plan: Plan) -> str:
    headers = ["stage", "layers", "replicas", "ranks", "in flight", "compute", "sends", "memory per GPU"]
    some_recompute = any(stage.recompute for stage in plan.stages)
    if some_recompute:
        headers.append("recomputes")
    # Only where some backwards of a minibatch find gradients to add to.
    adds = plan.microbatches > 1 and any(stage.accumulate_s for stage in plan.stages)
    if adds:
        headers.insert(headers.index("compute") + 1, "adding up")
    rows = [
        [
            number,
            layer_range(stage.layers),
            stage.replicas,
            ranks_line(stage),
            stage.in_flight,
            format_seconds(stage.compute_s),
            *([format_seconds(stage.accumulate_s)] if adds else []),
            _sends(plan, number),
            format_bytes(plan.memory_bytes(number)),
            *(["yes" if stage.recompute else "no"] if some_recompute else []),
        ]
        for number, stage in enumerate(plan.stages)
    ]
    return tabulate(rows, headers=headers, disable_numparse=True)


def layer_range(layers: tuple[str, ...]) -> str:
    """First to last, and how many: "features.0 .. features.9 (10)"."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]} ({len(layers)})"


def ranks_line(stage: Stage) -> str:
    """ "0-3", or "0, 2" where they are not consecutive."""
    ranks = stage.ranks
    consecutive = len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if consecutive else ", ".join(map(str, ranks))


def gpus(plan: Plan) -> str:
    """How many the cluster has, "1 GPU"."""
    count = plan.cluster.gpus
    return f"{count} GPU{'s' * (count > 1)}"


def _sends(plan: Plan, number: int) -> str:
    """Activations forward and gradients back, per microbatch."""
    forward = sum(transfer.output_bytes for transfer in plan.transfers if transfer.source == number)
    back = sum(transfer.gradient_bytes for transfer in plan.transfers if transfer.target == number)
    return format_bytes(forward + back)


def _prediction(plan: Plan) -> str:
    predicted, solver = plan.predicted, plan.solver
    seconds = f"{format_seconds(predicted.seconds_per_minibatch)} per minibatch"
    if predicted.samples_per_s is not None:
        seconds = f"{format_rate(predicted.samples_per_s)} samples/s, {seconds}"
    place = RESOURCES[predicted.bottleneck.resource].format(stage=predicted.bottleneck.stage)
    lines = [
        ("predicted", f"{seconds}, {_by(plan)}"),
        ("limited by", f"{place}, busy {format_seconds(predicted.bottleneck.busy_s)} per minibatch"),
        ("against one GPU", f"{predicted.speedup_over_one_gpu:.2f}x"),
        ("against data parallel", f"{predicted.speedup_over_data_parallel:.2f}x on {gpus(plan)}"),
        ("communication", _communication(plan)),
        ("solver", _solver(plan)),
    ]
    if predicted.by == "simulation" and solver.status != "optimal":
        lines.append(("bound", bound_line(plan)))
    if not plan.contiguous:
        lines.append(("stages", "not contiguous: this plan cannot be trained"))
    if solver.cost_model != "resource":
        lines.insert(1, ("cost model", f"{solver.cost_model}, as published"))
    return tabulate(lines, tablefmt="plain", disable_numparse=True)


def _communication(plan: Plan) -> str:
    predicted = plan.predicted
    parts = []
    if predicted.communication_bytes_per_sample is not None:
        parts.append(f"{format_bytes(predicted.communication_bytes_per_sample)} per sample")
    if predicted.data_parallel_communication_bytes_per_sample is not None:
        parts.append(f"data parallel {format_bytes(predicted.data_parallel_communication_bytes_per_sample)}")
    if predicted.communication_cut is not None:
        cut = predicted.communication_cut
        parts.append(f"{cut:.0%} less than data parallel" if cut >= 0 else f"{-cut:.0%} more than data parallel")
    return ", ".join(parts) or "none"


def _solver(plan: Plan) -> str:
    solver = plan.solver
    if solver.status == "optimal":
        quality = "optimal"
    elif plan.predicted.by == "cost model":
        quality = f"feasible, at most {solver.gap:.1%} from optimal"
    else:
        quality = "feasible"
    return f"{quality}, {solver.name} in {format_seconds(solver.seconds)}"


def _by(plan: Plan) -> str:
    """Who predicts."""
    if plan.predicted.by == "simulation":
        return "simulated"
    if plan.solver.cost_model == "resource" and plan.contiguous:
        why = "too large to simulate here" if plan.solver.exhausted else "the time limit left none to simulate it"
        return f"by the cost model: {why}"
    return "by the cost model"


def bound_line(plan: Plan) -> str:
    """How far the simulated time is from the bound of the cost model, and whether all was simulated that could be."""
    solver = plan.solver
    text = f"{solver.gap:.1%} above the cost model's bound of {format_seconds(solver.lower_bound_s)}"
    if solver.exhausted:
        return f"{text}; the fastest of {solver.simulated} simulated" if solver.simulated > 1 else text
    return f"{text}; {solver.simulated} simulated, others were left that could be faster"
