"""The report of a plan: what it runs on, what to expect of it, and how it compares with other ways
to train.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby

from planner.analysis.compare import ORDERS
from planner.analysis.fewer import COPY_EVERY, cost_of_loss, shares_left
from planner.analysis.limits import Limits, simulated_limits
from planner.formats.cluster import Cluster, DeviceKind, Level
from planner.formats.plan import GIVEN, Plan
from planner.formats.plan_parts import (
    ALONG_ORDER,
    Bottleneck,
    OtherWay,
    Prediction,
    SolverReport,
    Stage,
    StageMemory,
    config_words,
)
from planner.formats.profile import Profile
from planner.reporting.tables.device import device_words
from planner.reporting.tables.links import links_line
from planner.reporting.tables.table import Table, named_values, table_of
from planner.reporting.tables.verdict import best_baseline, share_of_speed, verdict_lines
from planner.schedule.instructions import LATE_UPDATES, MOMENTUM_UPDATES
from planner.solver.alternatives.usual_ways import DATA_PARALLEL, ONE_GPU
from planner.stages.replicas import update_words
from planner.units import (
    SLACK,
    as_fast,
    counted,
    format_bandwidth,
    format_bytes,
    format_memory,
    format_rate,
    format_seconds,
    format_times,
)

_PARTS = tuple(name for name in StageMemory.model_fields if name.endswith("_bytes"))
MUCH_MORE = 9.0  # a relative change that is written as a multiple
MOST_RUNS = 4  # of consecutive ranks of a stage that are listed one by one
_RESOURCES = {
    "compute": "the computation of stage {stage}",
    "link": "the link of stage {stage}",
    "shared_link": "the link of stage {stage}'s server",
    "boundary": "the transfer after stage {stage}",
}


def plan_report(plan: Plan, *, verbose: bool = False) -> str:
    """Report a verdict on the plan, its stages and its prediction; if `verbose`, also how it was
    found.
    """
    limits = simulated_limits(plan)
    parts = [
        "\n".join([*verdict_lines(plan, limits), *_bound(plan)]),
        named_values(_head(plan)),
        stage_table(plan).text(),
        memory_table(plan).text(),
        named_values(prediction_lines(plan, limits, verbose=verbose)),
    ]
    if plan.schedules:
        parts.append(schedules_table(plan).text())
    parts += [f"note: {note}" for note in plan.notes]
    return "\n\n".join(parts)


def _bound(plan: Plan) -> list[str]:
    """Say of a time that was not simulated that it is a lower bound."""
    if plan.predicted.by == "simulation":
        return []
    seconds = format_seconds(plan.predicted.seconds_per_minibatch)
    why = _by(plan).removeprefix("by the cost model: ")
    # A model of 340 billion parameters on 256 GPUs: 4.10 s by the cost model, 4.93 s simulated.
    return [
        f"at least {seconds} per minibatch, a lower bound ({why}): waiting is left out, which "
        f"took up to 20% more"
    ]


def unused_gpus(plan: Plan) -> str:
    """Say how many of the cluster's GPUs a plan leaves: " (2 of 4 GPUs are not used)"; nothing
    where it uses all.
    """
    unused = plan.cluster.gpus - plan.workers
    # Only a plan that is proven optimal knows what the unused GPUs would do.
    verdict = "is not used" if unused == 1 else "are not used"
    if plan.solver.status == "optimal" and not plan.estimated_faster:
        verdict = "would not make it faster"
    if not unused:
        return ""
    return f" ({unused} of {plan.cluster.gpus} GPUs {verdict})"


def _head(plan: Plan) -> list[tuple[str, str | None]]:
    return [
        ("model", plan.model),
        (
            "plan",
            f"{config_words(plan.config, plan.context_ranks)} on "
            f"{counted(plan.workers, 'GPU')}{unused_gpus(plan)}",
        ),
        ("sharding", plan.stages[0].sharding_words if plan.stages[0].repeats_shards else None),
        (
            "sequences",
            f"each sharded over {plan.context_ranks} ranks (context parallelism)"
            if plan.divides_sequences
            else None,
        ),
        ("schedule", schedule_line(plan)),
        ("update", update_line(plan)),
        ("gradients", staleness_line(plan)),
        ("cluster", cluster_line(plan.cluster)),
        ("links", links_line(plan)),
        (
            "device",
            device_words(plan.device) if plan.device.name != "unknown" else None,
        ),
        ("on the host", host_line(plan)),
        ("lengths", lengths_line(plan)),
        ("stages run", options_words(plan)),
    ]


def prediction_lines(
    plan: Plan,
    limits: Limits | None,
    *,
    verbose: bool = True,
) -> list[tuple[str, str | None]]:
    """Name what is predicted of a plan, and say it; None where nothing is to be said."""
    used = plan.predicted.flop_utilisation
    lines = [
        ("predicted", f"{speed(plan)}, {_by(plan)}"),
        ("in practice", practice_words(plan.predicted)),
        (
            "utilisation",
            f"{used:.1%} of the GPUs' peak, by the model's FLOPs" if used is not None else None,
        ),
        ("limited by", _limited_by(plan, limits)),
        ("speed-up", _speed_up(plan)),
        ("baselines", best_baseline_line(plan)),
        ("with fewer", shares_left(plan)),
        *_losses(plan),
        ("communication", _communication(plan)),
    ]
    return lines + (_search_lines(plan) if verbose else [("search", _open_end(plan))])


def _limited_by(plan: Plan, limits: Limits | None) -> str:
    """Name the busiest resource of the simulation; without one, that of the cost model, which
    leaves waiting out.
    """
    if limits is not None:
        return f"{limits.place}, busy {limits.share:.0%} of the time"
    return f"{bottleneck_place(plan.predicted.bottleneck)}, by the cost model"


def stopped_early(plan: Plan) -> bool:
    """Whether a search was stopped before it knew that no other plan is faster."""
    solver = plan.solver
    return not solver.exhausted and solver.status != "optimal" and solver.name != GIVEN


def _open_end(plan: Plan) -> str | None:
    """Say that a search was stopped before it knew; None where it was not."""
    if stopped_early(plan):
        return "stopped early: other plans could be faster; -v shows the bound"
    return None


def _search_lines(plan: Plan) -> list[tuple[str, str | None]]:
    """Say how the plan was found, and how far from the fastest it can be."""
    solver = plan.solver
    open_question = (
        plan.predicted.by == "simulation" and solver.status != "optimal" and solver.name != GIVEN
    )
    return [
        ("solver", _solver(plan)),
        ("bound", bound_words(solver) if open_question else None),
        ("cuts", solver.cuts or None),
    ]


def _losses(plan: Plan) -> list[tuple[str, str | None]]:
    """Say what copies for the loss of a host take, and what a loss does."""
    if not plan.smaller:
        return []
    cost = cost_of_loss(plan)
    of_link = f"{format_seconds(cost.copy_s)} of its link, by which {COPY_EVERY} minibatches take"
    of_link = f"{of_link} {format_seconds(COPY_EVERY * plan.predicted.seconds_per_minibatch)}"
    copies = f"up to {format_bytes(cost.memory_bytes)} of a host's memory; each takes {of_link}"
    moves = (
        f"{format_seconds(cost.restore_s)} until the state is in place, at most, besides the "
        f"start of processes"
    )
    if cost.restore_s == math.inf:
        moves = (
            "of the one host of this plan: the run goes on from its newest checkpoint, if it "
            "writes any"
        )

    return [("copies", copies), ("a loss", moves)]


def host_line(plan: Plan) -> str | None:
    """Say how much memory of the hosts a plan needs; None where nothing is offloaded to it."""
    if plan.cluster.offload is None:
        return None
    held = plan.host_bytes
    each = ""
    if len(held) > 1:
        each = f", of one GPU {format_bytes(max(held.values()))} at most"
    return (
        f"masters and optimizer states, which take {format_bytes(sum(held.values()))} of its "
        f"memory{each}; its CPU steps them"
    )


def lengths_line(plan: Plan) -> str | None:
    """Say for which lengths the plan was made; None where they do not vary."""
    if (known := plan.lengths) is None:
        return None
    ranges = zip(known.names, known.least, known.most, known.means, strict=True)
    words = ", ".join(
        f"{name} {least} to {most}, {mean:.1f} in the mean microbatch"
        for name, least, most, mean in ranges
    )
    return (
        f"{words}, {ORDERS.get(known.order, 'in an order of their own')}; memory for the greatest"
    )


def schedule_line(plan: Plan) -> str:
    """Return the schedule in words; with one stage, what it amounts to."""
    if len(plan.stages) == 1 and plan.schedule.stashes:
        if plan.workers > 1:
            return f"{plan.schedule}, which with one stage is data parallelism"
        return "one stage"
    title = plan.schedule.title.format(microbatches=plan.microbatches, chunks=plan.chunks)
    if plan.microbatches == 1:
        return title.replace("1 microbatches", "1 microbatch")
    return title


def update_line(plan: Plan) -> str:
    """Say after how many samples the weights are updated: "after a global batch of 128 samples,
    micro batches of 4".
    """
    line = f"after a global batch of {update_words(plan.samples_per_update, plan.microbatch_size)}"
    if plan.schedule.divides:
        line += in_tokens(plan)
        if plan.microbatch_size is not None and plan.microbatches > 1:
            line += f", micro batches of {plan.microbatch_size}"
    elif plan.samples_per_update[0] < plan.samples_per_update[1]:
        line += ": each stage after a microbatch on each of its replicas"
    return line


def row_update(way: OtherWay, plan: Plan) -> str:
    """Write the samples per update of another way; those of the plan's minibatches where an old
    file does not say.
    """
    if way.samples_per_update is not None:
        return update_range(way.samples_per_update)
    return f"{way.microbatches * (plan.microbatch_size or 1)}"


def update_range(samples: tuple[int, int]) -> str:
    """Write samples per update for a table: "128", or "4-28"."""
    least, most = samples
    if least == most:
        return f"{most}"
    return f"{least}-{most}"


def other_update(way: OtherWay, plan: Plan) -> str:
    """Say of another way how many samples make an update; nothing where they are as many as the
    plan's.
    """
    if way.samples_per_update is None or way.samples_per_update == plan.samples_per_update:
        return ""
    return f", {update_words(way.samples_per_update, plan.microbatch_size)} per update"


def staleness_line(plan: Plan) -> str:
    """Say how many updates stale the gradients are."""
    stale = plan.staleness
    if stale == 0:
        return "of the current weights"
    updates = f"up to {counted(stale, 'update')} stale"
    if stale > LATE_UPDATES:
        return f"{updates}: TRAINING MAY NOT CONVERGE"
    return f"{updates}, at the first stage" + (
        "; train with little momentum" if stale >= MOMENTUM_UPDATES else ""
    )


def staleness_warning(plan: Plan) -> tuple[str, str] | None:
    """Return a warning and a hint for a plan whose gradients are stale for nothing, or by many
    updates; or None.
    """
    for way in (plan.synchronous, plan.synchronous_usual):
        if way is None or not plan.staleness or share_of_speed(plan, way) <= 1:
            continue
        batch = other_update(way, plan).replace(", ", " with ", 1)
        faster = (
            f"the best plan under {way.schedule} is {as_fast(share_of_speed(plan, way))}{batch}"
        )
        hint = f"solve with `schedule={way.schedule}` and `microbatches={way.microbatches}`"
        return f"{faster}, and none of its gradients is stale", hint

    if plan.staleness <= LATE_UPDATES:
        return None
    stale = (
        f"gradients are up to {plan.staleness} updates stale, at which many models converge "
        f"slowly or not at all"
    )
    return (
        stale,
        f"bound it with `max_staleness={LATE_UPDATES}`, or choose a synchronous `schedule`",
    )


def cluster_line(cluster: Cluster) -> str:
    """Describe the cluster: sizes of its levels, inner to outer, rates and memory."""
    levels = ", ".join(map(_level_words, cluster.levels))
    if cluster.compress != "none":
        levels += f", activations sent as {cluster.compress}"
    if cluster.sequence_parallel:
        levels += ", sequence parallelism in tensor-parallel groups"
    if cluster.offload is not None:
        levels += f", {format_bandwidth(cluster.offload.link_bytes_per_s)} to the host's memory"
    levels += "" if cluster.overlap else ", where messages take time from computation"
    if not cluster.kinds:
        measured = ""
        if cluster.backend is not None:
            measured = f", measured over {cluster.backend}"
        return f"{levels}, {_memory(cluster.memory_bytes)}{measured}"

    return f"{levels}: {'; '.join(_kind_words(cluster, kind) for kind in cluster.kinds)}"


def _level_words(level: Level) -> str:
    words = f"{level.size} at {format_bandwidth(level.bandwidth_bytes_per_s)}"
    one_ring = level.one_ring_bandwidth_bytes_per_s
    if one_ring is not None:
        words += f" ({format_bandwidth(one_ring)} in one ring)"
    if level.latency_s:
        words += f" and {format_seconds(level.latency_s)} latency"
    if level.all_reduce_between_bytes_per_s is not None:
        slowest, fastest = map(format_bandwidth, level.all_reduce_between_bytes_per_s)
        words += (
            f" (all-reduces measured between {slowest} and {fastest}: something disturbed them)"
        )

    return words


def _kind_words(cluster: Cluster, kind: DeviceKind) -> str:
    named = f"of {kind.title}"
    if kind.name:
        named = kind.title
    words = f"{kind.count} {named}, {_memory(cluster.memory_of(kind))}"
    if kind.link_ratios is None:
        return words

    rates = [
        format_bandwidth(level.bandwidth_bytes_per_s * ratio)
        for level, ratio in zip(cluster.levels, kind.link_ratios, strict=True)
    ]
    return f"{words}, links of {' and '.join(rates)}"


def _memory(limit: int | None) -> str:
    if limit is None:
        return "no memory limit"
    return f"{format_memory(limit)} each"


def options_words(record: Profile | Plan) -> str | None:
    """List the options that are set: "autocast to bfloat16, channels-last, compiled"; None without
    any.
    """
    autocast = None
    if record.autocast:
        autocast = f"autocast to {record.autocast}"
    if record.master_weights:
        autocast = f"weights in {record.master_weights}, with float32 masters"
    frozen = f"frozen ones in {record.base_bits} bits" if record.base_bits else None
    products = f"products in {record.products}" if record.products else None
    chunked = record.chunked_loss
    in_chunks = f"the loss in {chunked.chunks} chunks of tokens" if chunked else None
    kernels = f"kernels of the {record.stack} stack" if record.stack else None
    flags = {
        "TF32": record.tf32,
        "compiled": record.compiled,
        "deterministic": record.deterministic,
    }
    set_flags = (word for word, is_set in flags.items() if is_set)
    words = (autocast, products, frozen, kernels, in_chunks, record.memory_format, *set_flags)
    return ", ".join(word for word in words if word) or None


def speed(plan: Plan) -> str:
    """Write the predicted tokens and samples per second, as far as they are known, and the time of
    a minibatch.
    """
    predicted = plan.predicted
    words = [pace(predicted.samples_per_s, predicted.seconds_per_minibatch)]
    if predicted.tokens_per_s is not None:
        words.insert(0, f"{format_rate(predicted.tokens_per_s)} tokens/s")
    return ", ".join(words)


def practice_words(predicted: Prediction) -> str | None:
    """Say how fast measured runs of a kind of estimate were: "runs like this reached 68 to 81% of
    the estimate: 14,551 to 17,303 tokens/s"; None where the profile was measured.
    """
    rate, unit = (
        (predicted.samples_per_s, "samples/s")
        if predicted.tokens_per_s is None
        else (predicted.tokens_per_s, "tokens/s")
    )
    if predicted.speed_interval is None or rate is None:
        return None
    least, most = predicted.speed_interval
    return (
        f"runs like this reached {100 * least:.0f} to {most:.0%} of the estimate: "
        f"{format_rate(rate * least)} to {format_rate(rate * most)} {unit}"
    )


def in_tokens(plan: Plan) -> str:
    """Write how many tokens the samples of a minibatch have: " (524,288 tokens)", " (2.1M tokens)";
    nothing where that is not known.
    """
    predicted = plan.predicted
    if predicted.tokens_per_s is None:
        return ""
    tokens = predicted.tokens_per_s * predicted.seconds_per_minibatch
    if tokens < 1e6:
        return f" ({tokens:,.0f} tokens)"
    return f" ({tokens / 1e6:.2g}M tokens)"


def pace(samples_per_s: float | None, seconds_per_minibatch: float) -> str:
    """Write samples per second, if they are known, and the time of a minibatch."""
    seconds = f"{format_seconds(seconds_per_minibatch)} per minibatch"
    if samples_per_s is None:
        return seconds
    return f"{format_rate(samples_per_s)} samples/s, {seconds}"


def _by(plan: Plan) -> str:
    if plan.predicted.by == "simulation":
        return "simulated"
    why = "the search ended before it was simulated"
    if plan.solver.exhausted:
        why = "too large to simulate"
    return f"by the cost model: {why}"


def bottleneck_place(bottleneck: Bottleneck) -> str:
    """Name the resource that limits the plan: "the link of stage 2"."""
    return _RESOURCES[bottleneck.resource].format(stage=bottleneck.stage)


def speed_ups(plan: Plan) -> dict[str, str]:
    """Write the speed-up over each usual way: "1.86x"; or that it does not fit."""
    predicted = plan.predicted
    if plan.schedule.divides:
        gpus = min(plan.cluster.gpus, plan.microbatches)
    else:
        gpus = plan.cluster.gpus

    on = f"data parallel on {counted(gpus, 'GPU')}"
    one = speed_over(predicted.speedup_over_one_gpu, plan.over_memory_bytes(ONE_GPU))
    return {
        "one GPU": one,
        on: speed_over(predicted.speedup_over_data_parallel, plan.over_memory_bytes(DATA_PARALLEL)),
    }


def speed_over(ratio: float | None, over_memory_bytes: int) -> str:
    """Write a speed-up: "1.86x"; nothing where it is None; or that one of the two ways does not fit
    the memory.
    """
    if over_memory_bytes:
        return f"does not fit ({format_bytes(over_memory_bytes)} too much)"
    if ratio is None:
        return ""
    return format_times(ratio)


def _speed_up(plan: Plan) -> str:
    over = max(map(plan.lacking_bytes, range(len(plan.stages))))
    if over:
        return f"none: the plan {speed_over(None, over)}"

    words = []
    for way, text in speed_ups(plan).items():
        if text.endswith("x"):
            words.append(f"{text} over {way}")
        else:
            words.append(f"{way} {text}")

    return ", ".join(words)


def best_baseline_line(plan: Plan) -> str | None:
    """Compare the plan with the fastest baseline that fits; None where data parallelism is that, or
    none is known.
    """
    best = best_baseline(plan)
    if best is None:
        if plan.baselines:
            return "none of them fits the memory"
        return None

    if best.name == DATA_PARALLEL:
        return None
    ratio = as_fast(1 / share_of_speed(plan, best))
    row = f"{best.name} ({config_words(best.config)})"
    line = f"the plan is {ratio} as the fastest baseline that fits, {row}{other_update(best, plan)}"
    if plan.estimated_faster and share_of_speed(plan, best) > 1 + SLACK:
        line += ", within the error of estimates"
    return line


def _communication(plan: Plan) -> str:
    predicted = plan.predicted
    parts = []

    own = predicted.communication_bytes_per_sample
    if own is not None:
        parts.append(f"{format_bytes(own)} per sample")

    theirs = predicted.data_parallel_communication_bytes_per_sample
    if theirs is not None:
        parts.append(f"data parallel {format_bytes(theirs)}")

    cut = _than_data_parallel(predicted.communication_cut)
    if cut:
        parts.append(cut)
    return ", ".join(parts) or "none"


def _than_data_parallel(cut: float | None) -> str:
    """Write a cut as "96% less than data parallel", or a negative one as "4% more" or "30x as
    much"; nothing where it is neither.
    """
    if cut is None or not round(cut, 2):
        return ""
    if -cut >= MUCH_MORE:
        return f"{1 - cut:,.0f}x as much as data parallel"
    if cut > 0:
        return f"{share_text(cut)} less than data parallel"
    return f"{-cut:.0%} more than data parallel"


def share_text(share: float) -> str:
    """Write a share: "96%"; "99.8%" where that would be all of it, and is not."""
    if round(share, 2) < 1 or share >= 1:
        return f"{share:.0%}"
    return f"{min(share, 0.999):.1%}"


def _solver(plan: Plan) -> str:
    solver = plan.solver
    if solver.name == GIVEN:
        return "none: the stages were given"

    how = f"{solver.name} in {format_seconds(solver.seconds)}"
    if solver.status == "optimal":
        return f"optimal, {how}"
    if plan.predicted.by == "cost model":
        return f"feasible, at most {solver.gap:.1%} from optimal, {how}"
    return f"feasible, {how}"


def schedules_table(plan: Plan) -> Table:
    """Tabulate the best plan under each schedule."""
    per_s = "samples/s"
    if plan.microbatch_size is None:
        per_s = "microbatches/s"
    rows = [
        {
            "schedule": str(way.schedule),
            "plan": config_words(way.config),
            per_s: format_rate((plan.microbatch_size or 1) / way.seconds_per_microbatch),
            "memory": format_bytes(way.memory_bytes),
            "per update": row_update(way, plan),
            "stale": way.staleness,
            "": "chosen" if way.schedule is plan.schedule else "",
        }
        for way in plan.schedules
    ]
    return table_of(rows)


def which_plans(solver: SolverReport) -> str:
    """Say which plans a bound holds for: " in the profile's order", with some cuts, or nothing
    where for all.
    """
    limits = []
    if solver.bound_of:
        limits = solver.bound_of.split(", ")

    parts = []
    if ALONG_ORDER in limits or not solver.cuts:
        parts.append("in the profile's order")
    parts += [f"with {each}" for each in limits if each != ALONG_ORDER]
    if not parts:
        return ""
    return f" {' and '.join(parts)}"


def bound_words(solver: SolverReport) -> str:
    """Say what no plan is faster than by the cost model, and which of the simulated plans
    this is.
    """
    least_s = format_seconds(solver.lower_bound_s)
    least = f"no plan{which_plans(solver)} takes less than {least_s}, {solver.gap:.1%} less"
    if not solver.simulated:
        return least
    others = "no other" if solver.exhausted else "others"
    return f"{least}; fastest of {solver.simulated} simulated; {others} could be faster"


def memory_table(plan: Plan) -> Table:
    """Tabulate the memory per GPU and its parts; equal neighbours, and stages of one GPU, share a
    row.
    """
    stages_on: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        stages_on[stage.ranks].append(number)
    parts = {numbers[0]: memory_parts(plan, numbers[0]) for numbers in stages_on.values()}
    shown = [name for name in _PARTS if any(sizes[name] for sizes in parts.values())]

    def cells(number: int) -> list[str]:
        return [format_bytes(parts[number][name]) for name in shown]

    rows = []
    for own, alike in groupby(parts, key=cells):
        numbers = list(alike)
        total = format_bytes(sum(parts[numbers[0]].values()))
        held = [stages_on[plan.stages[number].ranks] for number in numbers]
        rows.append([_stages_of_gpus(held), total, *own])

    uses = [name.removesuffix("_bytes").replace("_", " ") for name in shown]
    headers = ["stage", "memory per GPU", *uses]
    return Table(headers, rows, "l" + "r" * (len(headers) - 1))


def _stages_of_gpus(held: Sequence[Sequence[int]]) -> str:
    """Name the stages of consecutive GPUs: "0-3", or "0, 7 to 3, 4" where each has two."""
    first, *_, last = [*held, held[-1]]
    if len(first) == 1:
        return number_range([numbers[0] for numbers in held])

    texts = [", ".join(map(str, numbers)) for numbers in (first, last)]
    return " to ".join(dict.fromkeys(texts))


def memory_parts(plan: Plan, stage: int) -> dict[str, int]:
    """Return what each GPU of the stage holds by use, with what its other stages hold."""
    held = [other.memory for other in plan.stages if other.ranks == plan.stages[stage].ranks]
    return {name: sum(getattr(memory, name) for memory in held) for name in _PARTS}


def stage_table(plan: Plan) -> Table:
    """Tabulate the stages; columns in which nothing is to be said are left out."""
    sent = _sent_bytes(plan)
    rows = [
        {
            **_place_cells(plan, stage, number),
            **_time_cells(plan, stage),
            "sends": format_bytes(sent[number]),
            **_saving_cells(plan, stage),
        }
        for number, stage in enumerate(plan.stages)
    ]
    return table_of(rows)


def _sent_bytes(plan: Plan) -> Counter[int]:
    """Return the bytes that each stage sends per microbatch: activations forward, gradients
    back.
    """
    sent = Counter[int]()
    for transfer in plan.transfers:
        sent[transfer.source] += transfer.output_bytes
        sent[transfer.target] += transfer.gradient_bytes
    return sent


def _place_cells(plan: Plan, stage: Stage, number: int) -> dict[str, object]:
    """Say which layers a stage has, and on which GPUs."""
    ranks_per_replica = None
    if plan.divides_layers:
        ranks_per_replica = stage.ranks_per_replica

    kind = None
    if plan.cluster.kinds:
        kind = plan.cluster.kinds_on(stage.ranks)

    return {
        "stage": number,
        "layers": layer_range(stage.layers),
        "replicas": stage.replicas,
        "of ranks": ranks_per_replica,
        "ranks": ranks_line(stage),
        "GPU": kind,
    }


def _time_cells(plan: Plan, stage: Stage) -> dict[str, object]:
    """Say how many microbatches a stage has in flight, how stale it is, and how long it takes."""
    stale = None
    if any(plan.schedule.staleness(each.in_flight) for each in plan.stages):
        stale = plan.schedule.staleness(stage.in_flight)

    # A replica's first backward after an update has no gradients to accumulate into, so one
    # microbatch never does.
    accumulation = None
    if plan.microbatches > 1 and any(each.accumulate_s for each in plan.stages):
        accumulation = format_seconds(stage.accumulate_s)

    return {
        "in flight": stage.in_flight,
        "stale": stale,
        "compute": format_seconds(stage.compute_s),
        "accumulation": accumulation,
    }


def _saving_cells(plan: Plan, stage: Stage) -> dict[str, object]:
    """Say what a stage shards and recomputes, with a column for each part that any stage
    shards.
    """
    cells: dict[str, object] = {}
    for part in dict.fromkeys(part for each in plan.stages for part in each.sharded_parts):
        cells[part] = "whole"
        if part in stage.sharded_parts:
            cells[part] = f"1/{stage.shards}"

    cells["recomputes"] = None
    if any(each.recomputes for each in plan.stages):
        cells["recomputes"] = stage.recomputation_words or "nothing"
    return cells


def ranks_line(stage: Stage) -> str:
    """Write the ranks in ascending order: "0-3", "0, 2"; of many runs the first and the last."""
    # Within a run of consecutive ranks, rank minus place is the same.
    numbered = enumerate(sorted(stage.ranks))
    runs = groupby(numbered, key=lambda pair: pair[1] - pair[0])
    words = [number_range([rank for _, rank in run]) for _, run in runs]

    if len(words) > MOST_RUNS:
        words = [*words[:2], "...", words[-1]]
    return ", ".join(words)


def number_range(numbers: Sequence[int]) -> str:
    """Write the first and the last of consecutive numbers: "0-3", or "2" alone."""
    if len(numbers) == 1:
        return f"{numbers[0]}"
    return f"{numbers[0]}-{numbers[-1]}"


def layer_range(layers: Sequence[str]) -> str:
    """Write the first and the last layer, and how many: "features.0 .. features.9 (10)"."""
    if len(layers) == 1:
        return layers[0]
    return f"{layers[0]} .. {layers[-1]} ({len(layers)})"
