"""The reports of questions about plans: baselines, numbers of GPUs, and what limits a plan."""

from planner.analysis.compare import PACKED, Comparison, ComparisonRow
from planner.analysis.explain import Alternative, Explanation
from planner.analysis.limits import simulated_limits
from planner.formats.fit import Fit, FitRow
from planner.formats.plan import GIVEN, Plan
from planner.formats.plan_parts import config_words
from planner.plan.trainable import is_trained_here
from planner.reporting.tables import plan as words
from planner.reporting.tables.cost import cost_cells, cost_lines
from planner.reporting.tables.device import unmeasured_in_plan
from planner.reporting.tables.links import links_line
from planner.reporting.tables.table import Table, named_values, optional_text, table_of
from planner.reporting.tables.trainer_run import trainer_run_report
from planner.reporting.tables.utilisation import little_use_words
from planner.reporting.tables.verdict import share_of_speed, verdict_lines
from planner.solver.alternatives.simpler_ways import indistinct_share
from planner.solver.tuning.record import STANDARD
from planner.stages.replicas import update_words
from planner.units import (
    SLACK,
    as_fast,
    counted,
    format_bytes,
    format_rate,
    format_seconds,
)

_NAMES = {
    "compute": "computation",
    "receive": "link, receiving",
    "send": "link, sending",
    "shared_link": "server's link",
}
WORTH_A_ROW = 0.05  # share of the time that a resource is busy
_WORTH_A_SENTENCE = 0.005  # share of the time spent waiting


def comparison_report(comparison: Comparison) -> str:
    """Report the chosen plan and the baselines, one row each."""
    head = named_values(
        [("model", comparison.model), ("cluster", words.cluster_line(comparison.cluster))]
    )
    return f"{head}\n\n{comparison_table(comparison).text()}\n\n{comparison_legend(comparison)}"


def comparison_table(comparison: Comparison) -> Table:
    """Return a row for the plan and for each baseline and other schedule."""
    chosen = comparison.rows[0]
    unit = "sample"
    rate = "samples/s"
    if chosen.samples_per_s is None:
        unit = "batch"
        rate = "batches/s"
    if chosen.tokens_per_s is not None:
        rate = "tokens/s"
    return table_of([_cells(row, unit, rate) for row in comparison.rows], "lllrrrrrrrr")


def _cells(row: ComparisonRow, unit: str, rate: str) -> dict[str, str | None]:
    per_s = row.tokens_per_s or row.samples_per_s or 1 / row.seconds_per_microbatch
    sent = row.communication_bytes_per_sample
    if sent is None:
        sent = row.communication_bytes

    return {
        "": row.name,
        "speed-up": words.speed_over(row.speedup, row.over_memory_bytes),
        "config": config_words(row.config),
        rate: format_rate(per_s),
        "MFU": optional_text(row.flop_utilisation, "{:.0%}".format),
        "memory": format_bytes(row.memory_bytes),
        f"sent/{unit}": format_bytes(sent),
        "sent vs DP": optional_text(row.communication_cut, lambda cut: _signed(-cut)) or "",
        "update": optional_text(row.samples_per_update, words.update_range),
        "stale": f"{row.staleness}",
        "idle": f"{max(0.0, row.idle_share):.0%}",
    }


def _signed(change: float) -> str:
    """Write a relative change: "-96%", "+150%", "9,437x"; one that rounds to nothing has no
    sign.
    """
    if not round(change, 2):
        return "0%"
    if change >= words.MUCH_MORE:
        return f"{1 + change:,.0f}x"
    if change < 0:
        return f"-{words.share_text(-change)}"
    return f"{change:+.0%}"


def comparison_legend(comparison: Comparison) -> str:
    """Explain the columns, and the rows that run under another schedule."""
    lines = []
    if comparison.over:
        lines.append(
            f"speed-up: over {comparison.over}; sent vs DP: bytes, relative to data parallelism"
        )

    lines.append(
        "memory: per GPU; stale: updates by which gradients are; idle: share of the workers' time "
        "without computation"
    )
    lines.append(_updates_line(comparison))
    chosen, *others = comparison.rows
    updates = {
        row.name: (row.schedule, row.microbatches)
        for row in others
        if row.schedule != chosen.schedule
    }
    for schedule, microbatches in dict.fromkeys(updates.values()):
        own = [name for name, update in updates.items() if update == (schedule, microbatches)]
        named = "all others"
        if len(own) < len(others):
            named = ", ".join(own)
        lines.append(f"{named}: {schedule}, one update for {microbatches} microbatches")

    if any("ZeRO" in row.name for row in others):
        lines.append(
            "ZeRO-1 to 3: data parallel, with the optimizer's state, gradients, weights sharded "
            "over the GPUs"
        )

    if any(row.name == PACKED for row in others):
        lines.append(
            "packed: several samples in one row of the greatest length, without any padding "
            "between them"
        )

    if chosen.flop_utilisation is not None:
        lines.append(
            "MFU: share of the GPUs' peak that the model's FLOPs take, without recomputation"
        )

    if by_formula := [
        row.name for row in comparison.rows if not row.simulated and "ZeRO-" not in row.name
    ]:
        names = "all"
        if len(by_formula) < len(comparison.rows):
            names = "; ".join(by_formula)  # some names have commas
        lines.append(
            f"{names}: by the cost model, without simulation, so waiting for messages is left out"
        )

    return "\n".join(lines)


def _updates_line(comparison: Comparison) -> str:
    """Say what rows are updates of, and whether they are of equally many samples."""
    unit = "samples"
    if comparison.rows[0].samples_per_s is None:
        unit = "microbatches"
    line = f"update: {unit} whose gradients make one update"
    if len({row.samples_per_update for row in comparison.rows}) > 1:
        line += ", which differ between rows: so do these trainings, not only in speed"
    return line


def fit_report(answer: Fit) -> str:
    """Say whether the model fits, how to split it, how fast it is, and what other ways and fewer
    GPUs give.
    """
    plan = answer.asked.plan
    if plan is None:
        others = (
            f"it fits {row.gpus} of these GPUs"
            for row in reversed(answer.others)
            if row.plan is not None
        )
        least = "no other number of GPUs was tried"
        if answer.others and not answer.others[0].unknown:
            least = f"nor does it fit {answer.others[0].gpus}"
        known = "not known" if answer.asked.unknown else "no"
        why = f"{known}: {answer.asked.why_not}; {next(others, least)}"
        hint = answer.asked.hint or None
        parts = [named_values([("model", answer.model), ("fits", why), ("hint", hint)])]
    else:
        limits = simulated_limits(plan)
        verdict = "\n".join(verdict_lines(plan, limits))
        parts = [verdict, named_values(_head(answer, plan)), _ways(plan).text()]
        parts += [f"note: {note}" for note in plan.notes]
        if odd := little_use_words(plan, limits):
            parts.append(f"warning: {odd}")

    if answer.trainer_run is not None:
        parts.insert(0, trainer_run_report(answer.trainer_run))
    if answer.others:
        parts.append(_numbers_of_gpus(answer).text())
    if cost := cost_lines(answer):
        parts.append("\n".join(cost))
    if answer.not_tried:
        left = "; ".join(answer.not_tried)
        parts.append(f"note: the time limit ended the search before it tried: {left}")

    return "\n\n".join(parts)


def _head(answer: Fit, plan: Plan) -> list[tuple[str, str | None]]:
    used = plan.predicted.flop_utilisation
    limit = plan.cluster.memory_bytes
    full = ""
    if limit:
        full = f", {_most(plan) / limit:.0%} of the {format_bytes(limit)}"
    if limit and plan.device.memory_bytes and limit < plan.device.memory_bytes:
        full += f" that plans may fill ({limit / plan.device.memory_bytes:.0%} of its memory)"
    split = _split(plan)
    saved = {"recomputation": sum(bool(stage.recomputes) for stage in plan.stages)}
    if "ZeRO" not in split:
        saved["a sharded optimizer's state"] = sum(
            stage.shards_optimizer_alone for stage in plan.stages
        )

    of_all = ""
    if len(plan.stages) > 1:
        of_all = f" of {len(plan.stages)} stages"
    saving = [
        f", {what}" + (of_all and f" in {count}{of_all}") for what, count in saved.items() if count
    ]
    return [
        (
            "model",
            f"{answer.model}, global batch of {plan.minibatch_size} samples"
            f"{words.in_tokens(plan)}, micro batches of {plan.microbatch_size}",
        ),
        ("stages run", words.options_words(plan)),
        ("GPUs", _gpus_line(plan)),
        ("links", links_line(plan)),
        ("fits", f"yes: {format_bytes(_most(plan))} on the fullest GPU{full}"),
        ("plan train", _eager_words(plan)),
        ("on the host", words.host_line(plan)),
        ("split", split + words.unused_gpus(plan) + "".join(saving)),
        ("schedule", words.schedule_line(plan)),
        ("gradients", words.staleness_line(plan) if plan.staleness else None),
        ("speed", words.speed(plan) + ("" if used is None else f", {used:.0%} of the GPUs' peak")),
        ("in practice", words.practice_words(plan.predicted)),
        ("baselines", words.best_baseline_line(plan)),
        ("kernels", unmeasured_in_plan(plan)),
        (
            "search",
            "stopped early: other plans could be faster" if words.stopped_early(plan) else None,
        ),
        (
            "numbers",
            "estimated, on no GPU: docs/gpu-truth.md compares such estimates with published "
            "measurements",
        ),
    ]


def _eager_words(plan: Plan) -> str | None:
    """Say that `train` may need more than what was priced, where it does not run those kernels."""
    if plan.stack in (None, "eager") or plan.compiled or not is_trained_here(plan):
        return None
    return (
        "may need more memory and time than that, since it runs these stages eagerly: "
        "`stack=eager` plans for it"
    )


def _gpus_line(plan: Plan) -> str:
    line = words.cluster_line(plan.cluster)
    if plan.cluster.kinds:
        return line
    return f"{plan.device.name}; {line}"


def _ways(plan: Plan) -> Table:
    """Tabulate what people do without a planner, on the same GPUs."""
    rows = [
        [
            "this plan",
            config_words(plan.config, plan.context_ranks),
            format_bytes(_most(plan)),
            words.update_range(plan.samples_per_update),
            format_rate(_per_s(plan)),
            "",
        ]
    ]
    # of the plan's speed, which estimates do not tell from it
    most_share = 1 / (1 - indistinct_share(plan, STANDARD))
    for way in plan.baselines:
        share = share_of_speed(plan, way)
        over = way.over_memory_bytes
        ratio = words.speed_over(1 / share, over)
        if not over and 1 + SLACK < share <= most_share:
            ratio += ", within the error"
        rows.append(
            [
                way.name,
                config_words(way.config),
                format_bytes(way.memory_bytes),
                words.row_update(way, plan),
                "" if over else format_rate(_per_s(plan) * share),
                ratio,
            ]
        )

    headers = ["on the same GPUs", "config", "memory", "per update", _unit(plan), "the plan is"]
    return Table(headers, rows, "llrrrr")


def _numbers_of_gpus(answer: Fit) -> Table:
    """Tabulate the plan for each number of GPUs that was tried: the most first, or the least where
    the model does not fit what was asked about.
    """
    rows = [*answer.others, answer.asked]
    unit = next((_unit(row.plan) for row in rows if row.plan is not None), "")
    rows.sort(key=lambda row: row.gpus, reverse=answer.asked.plan is not None)
    cells = [_gpus_cells(answer, row, unit) for row in rows]
    numbers = len(cells[0]) - 2  # beside the GPUs and their split
    return table_of(cells, f"rl{'r' * numbers}")


def _gpus_cells(answer: Fit, row: FitRow, unit: str) -> dict[str, str]:
    cells = {
        "GPUs": row.kinds or f"{row.gpus}",
        "split": "not known: the time ended" if row.unknown else "no plan fits",
        "memory": "",
        unit: "",
        "per GPU": "",
    }
    if answer.run is not None:
        cells |= cost_cells(row, answer.run)

    plan = row.plan
    if plan is not None:
        cells["split"] = _split(plan)
        cells["memory"] = format_bytes(_most(plan))
        cells[unit] = format_rate(_per_s(plan))
        cells["per GPU"] = format_rate(_per_s(plan) / plan.workers)

    return cells


def _split(plan: Plan) -> str:
    stages = len(plan.stages)
    config = config_words(plan.config, plan.context_ranks)
    if plan.divides_sequences:
        config += f", {plan.context_words}"
    if stages > 1:
        if config.endswith("stages)"):
            return config
        return f"{config} ({stages} stages)"

    stage = plan.stages[0]
    if not stage.shards_optimizer:
        return config
    return f"{config}, {stage.sharding_words.removeprefix('data parallel, ')}"


def _unit(plan: Plan) -> str:
    if plan.predicted.tokens_per_s is None:
        return "samples/s"
    return "tokens/s"


def _per_s(plan: Plan) -> float:
    return plan.predicted.tokens_per_s or plan.predicted.samples_per_s or 0.0


def _most(plan: Plan) -> int:
    """Return the memory of the fullest GPU."""
    return max(map(plan.memory_bytes, range(len(plan.stages))))


def explanation_report(explanation: Explanation, *, verbose: bool = False) -> str:
    """Report what limits the plan, the slack of everything else, and the alternatives.

    Resources that are hardly used are left out, unless it is `verbose`.
    """
    least_share = 0.0 if verbose else WORTH_A_ROW
    parts = [sentences(explanation), busy_table(explanation, least_share).text()]
    idle = sum(use.share < least_share for use in explanation.uses)
    if idle:
        parts.append(
            f"left out: {counted(idle, 'resource')}, busy for less than {WORTH_A_ROW:.0%} of the "
            f"time"
        )

    return "\n\n".join(parts)


def sentences(explanation: Explanation) -> str:
    """Say what limits the plan, whether it is optimal, and what would help."""
    bottleneck = explanation.bottleneck
    seconds = explanation.seconds_per_minibatch
    lines = [
        f"The plan {config_words(explanation.config)} takes {format_seconds(seconds)} per "
        f"minibatch, limited by "
        f"{words.bottleneck_place(bottleneck)}, which is busy {bottleneck.busy_s / seconds:.0%} "
        f"of that."
    ]
    update = update_words(explanation.samples_per_update, explanation.microbatch_size)
    lines.append(f"It updates the weights after {update}.")
    if explanation.waiting_s > _WORTH_A_SENTENCE * seconds:
        lines.append(
            f"For the other {format_seconds(explanation.waiting_s)} "
            f"({explanation.waiting_s / seconds:.0%}) it waits "
            "for messages or for other replicas."
        )

    lines.append(_optimality(explanation))
    lines += [_gain(each) for each in explanation.what_if]
    if explanation.out_of_time:
        lines.append("The time limit ended the search: more may be gained.")
    return "\n".join(lines)


def _optimality(explanation: Explanation) -> str:
    solver = explanation.solver
    if solver.name == GIVEN:
        return "You chose the stages: no search says how far from the fastest plan this is."
    if solver.status == "optimal":
        least = format_seconds(solver.lower_bound_s)
        bound = f"By the cost model no plan{words.which_plans(solver)} takes less than {least}"
        return (
            f"{bound}: the search was "
            f"exact{', up to 1% of simulation' if solver.simulated else ''}."
        )

    return f"By the cost model {words.bound_words(solver)}."


def _gain(alternative: Alternative) -> str:
    start = f"With {alternative.what}"
    gain = alternative.gain
    if gain is None:
        return f"{start} no plan would fit."
    if gain == 0:
        if alternative.out_of_time:
            return f"{start} no faster plan was found before the time limit."
        return f"{start} it would not be faster."

    if gain >= 1:
        faster = as_fast(1 + gain)
    else:
        faster = f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
    if alternative.out_of_time:
        faster = f"at least {faster}"

    return f"{start} the plan would be {config_words(alternative.config or '')}, {faster}."


def busy_table(explanation: Explanation, least_share: float = 0.0) -> Table:
    """Return the busy times and the slack of the resources that are busy for so much of the
    time.
    """
    seconds = explanation.seconds_per_minibatch
    rows = [
        {
            "stage": "" if use.stage is None else use.stage,
            "resource": _NAMES.get(use.resource, use.resource),
            "busy": format_seconds(use.busy_s),
            "of the time": f"{use.share:.1%}",
            "slack": format_seconds(
                slack_s if (slack_s := seconds - use.busy_s) > SLACK * seconds else 0.0
            ),
        }
        for use in explanation.uses
        if use.share >= least_share
    ]
    return table_of(rows)
