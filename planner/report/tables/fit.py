"""The screen of `plan fit`."""

from __future__ import annotations

from planner.analysis.fit import Fit, FitRow
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay, short_config
from planner.report.tables.plan import (
    best_baseline_line,
    cluster_line,
    options_words,
    pace,
    schedule_line,
    share_of_speed,
    speed_over,
    staleness_line,
)
from planner.report.tables.stages import recomputing
from planner.report.tables.table import Table, named_values
from planner.units import format_bytes, format_rate, format_share_of_memory


def fit_report(answer: Fit) -> str:
    """Say whether the model fits, how to split it, how fast it is, and what other ways and fewer GPUs give."""
    plan = answer.asked.plan
    parts = [_refusal(answer) if plan is None else _head(answer, plan)]
    if plan is not None and plan.baselines:
        parts.append(_ways(plan).text())
    if answer.others:
        rows = (answer.asked, *answer.others) if plan is not None else (*answer.others, answer.asked)
        parts.append(_numbers_of_gpus(rows).text())
    return "\n\n".join(parts)


def _head(answer: Fit, plan: Plan) -> str:
    predicted = plan.predicted
    utilisation = "" if predicted.flop_utilisation is None else f", {predicted.flop_utilisation:.0%} of the GPUs' peak"
    tokens = "" if predicted.tokens_per_s is None else f"{format_rate(predicted.tokens_per_s)} tokens/s, "
    lines = [
        ("model", f"{answer.model}, minibatches of {plan.minibatch_size} samples, {plan.microbatch_size} at a time"),
        ("GPUs", f"{plan.device.name}; {cluster_line(plan.cluster)}"),
        ("fits", f"yes: {_fullest(plan)}"),
        ("split", f"{_split(plan)}{_options(plan)}"),
        ("schedule", schedule_line(plan)),
        ("speed", f"{tokens}{pace(predicted.samples_per_s, predicted.seconds_per_minibatch)}{utilisation}"),
        ("numbers", "estimated, on no GPU: docs/gpu-truth.md compares such estimates with published measurements"),
    ]
    if plan.staleness:
        lines.insert(5, ("gradients", staleness_line(plan)))
    if (beside := best_baseline_line(plan)) is not None:
        lines.insert(-1, ("baselines", beside))
    if words := options_words(plan):
        lines.insert(1, ("stages run", words))
    return named_values(lines)


def _options(plan: Plan) -> str:
    """Say what the stages do to save memory."""
    parts = []
    if any(stage.sharded for stage in plan.stages):
        parts.append("replicas divide the optimizer's state")
    if again := [stage for stage in plan.stages if stage.recomputes]:
        what = recomputing(again[0]) if len(plan.stages) == 1 else f"{len(again)} of {len(plan.stages)} stages"
        parts.append(f"{what} recompute{'s' * (what == '1')}")
    return "".join(f", {part}" for part in parts)


def _refusal(answer: Fit) -> str:
    fitting = [row.gpus for row in answer.others if row.plan is not None]
    enough = f"it fits {fitting[-1]} of these GPUs" if fitting else f"nor does it fit {answer.others[0].gpus}"
    lines = [("model", answer.model), ("fits", f"no: {answer.asked.why_not}; {enough}")]
    return named_values(lines)


def _ways(plan: Plan) -> Table:
    """Tabulate what people do without a planner, on the same GPUs."""
    rows = [["this plan", short_config(plan.config), _fullest_bytes(plan), _rate(plan, None), ""]]
    for way in plan.baselines:
        fitting = not way.over_memory_bytes
        ratio = speed_over(1 / share_of_speed(plan, way) if fitting else None, way.over_memory_bytes)
        rows.append(
            [way.name, short_config(way.config), format_bytes(way.memory_bytes), _rate(plan, way) * fitting, ratio]
        )
    return Table(["on the same GPUs", "config", "memory", _unit(plan), "the plan is"], rows, "llrrr")


def _numbers_of_gpus(rows: tuple[FitRow, ...]) -> Table:
    known = next((row.plan for row in rows if row.plan is not None), None)
    cells = [
        [f"{row.gpus}", "no plan fits", "", "", ""]
        if row.plan is None
        else [
            f"{row.gpus}",
            _split(row.plan),
            _fullest_bytes(row.plan),
            _rate(row.plan, None),
            format_rate((_per_s(row.plan, None)) / row.plan.workers),
        ]
        for row in rows
    ]
    return Table(["GPUs", "split", "memory", "" if known is None else _unit(known), "per GPU"], cells, "rlrrr")


def _split(plan: Plan) -> str:
    stages = len(plan.stages)
    config = short_config(plan.config)
    return f"{config} ({stages} stages)" if stages > 1 else f"{config} (data parallel)" if plan.workers > 1 else config


def _unit(plan: Plan) -> str:
    return "samples/s" if plan.predicted.tokens_per_s is None else "tokens/s"


def _per_s(plan: Plan, way: OtherWay | None) -> float:
    """Return tokens or samples per second, of the plan or of another way."""
    rate = plan.predicted.tokens_per_s or plan.predicted.samples_per_s or 0.0
    return rate if way is None else rate * share_of_speed(plan, way)


def _rate(plan: Plan, way: OtherWay | None) -> str:
    return format_rate(_per_s(plan, way))


def _fullest_bytes(plan: Plan) -> str:
    return format_bytes(max(map(plan.memory_bytes, range(len(plan.stages)))))


def _fullest(plan: Plan) -> str:
    most, limit = max(map(plan.memory_bytes, range(len(plan.stages)))), plan.cluster.memory_bytes
    return f"{format_bytes(most) if limit is None else format_share_of_memory(most, limit)} on the fullest GPU"
