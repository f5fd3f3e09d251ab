"""The screen of `plan fit`."""

from __future__ import annotations

from planner.analysis.fit import Fit
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.reporting.tables.plan import (
    best_baseline_line,
    cluster_line,
    options_words,
    schedule_line,
    share_of_speed,
    speed,
    speed_over,
    staleness_line,
)
from planner.reporting.tables.stages import recomputing
from planner.reporting.tables.table import Table, named_values
from planner.units import format_bytes, format_rate, format_share_of_memory


def fit_report(answer: Fit) -> str:
    """Say whether the model fits, how to split it, how fast it is, and what other ways and fewer GPUs give."""
    plan = answer.asked.plan
    parts = [named_values(_refusal(answer) if plan is None else _head(answer, plan))]
    if plan is not None and plan.baselines:
        parts.append(_ways(plan).text())
    if answer.others:
        parts.append(_numbers_of_gpus(answer).text())
    return "\n\n".join(parts)


def _head(answer: Fit, plan: Plan) -> list[tuple[str, str | None]]:
    used, limit = plan.predicted.flop_utilisation, plan.cluster.memory_bytes
    fullest = format_bytes(_most(plan)) if limit is None else format_share_of_memory(_most(plan), limit)
    again = [stage for stage in plan.stages if stage.recomputes]
    alone = f"{recomputing(again[0])} recomputed" if again and len(plan.stages) == 1 else ""
    saving = [
        "replicas divide the optimizer's state" if any(stage.sharded for stage in plan.stages) else "",
        alone or (f"recomputation in {len(again)} of {len(plan.stages)} stages" if again else ""),
    ]
    return [
        ("model", f"{answer.model}, minibatches of {plan.minibatch_size} samples, {plan.microbatch_size} at a time"),
        ("stages run", options_words(plan)),
        ("GPUs", f"{plan.device.name}; {cluster_line(plan.cluster)}"),
        ("fits", f"yes: {fullest} on the fullest GPU"),
        ("split", ", ".join([_split(plan), *filter(None, saving)])),
        ("schedule", schedule_line(plan)),
        ("gradients", staleness_line(plan) if plan.staleness else None),
        ("speed", speed(plan) + ("" if used is None else f", {used:.0%} of the GPUs' peak")),
        ("baselines", best_baseline_line(plan)),
        ("numbers", "estimated, on no GPU: docs/gpu-truth.md compares such estimates with published measurements"),
    ]


def _refusal(answer: Fit) -> list[tuple[str, str]]:
    fitting = [row.gpus for row in answer.others if row.plan is not None]
    enough = f"it fits {fitting[-1]} of these GPUs" if fitting else f"nor does it fit {answer.others[0].gpus}"
    return [("model", answer.model), ("fits", f"no: {answer.asked.why_not}; {enough}")]


def _ways(plan: Plan) -> Table:
    """Tabulate what people do without a planner, on the same GPUs."""
    rows = [["this plan", short_config(plan.config), format_bytes(_most(plan)), format_rate(_per_s(plan)), ""]]
    for way in plan.baselines:
        share, over = share_of_speed(plan, way), way.over_memory_bytes
        rate = "" if over else format_rate(_per_s(plan) * share)
        ratio = speed_over(1 / share, over)
        rows.append([way.name, short_config(way.config), format_bytes(way.memory_bytes), rate, ratio])
    return Table(["on the same GPUs", "config", "memory", _unit(plan), "the plan is"], rows, "llrrr")


def _numbers_of_gpus(answer: Fit) -> Table:
    others = list(answer.others)
    rows = [answer.asked, *others] if answer.asked.plan is not None else [*others, answer.asked]
    cells, unit = [], ""
    for row in rows:
        if (plan := row.plan) is None:
            cells.append([f"{row.gpus}", "no plan fits", "", "", ""])
            continue
        unit, rate = _unit(plan), _per_s(plan)
        each = format_rate(rate / plan.workers)
        cells.append([f"{row.gpus}", _split(plan), format_bytes(_most(plan)), format_rate(rate), each])
    return Table(["GPUs", "split", "memory", unit, "per GPU"], cells, "rlrrr")


def _split(plan: Plan) -> str:
    stages = len(plan.stages)
    config = short_config(plan.config)
    return f"{config} ({stages} stages)" if stages > 1 else f"{config} (data parallel)" if plan.workers > 1 else config


def _unit(plan: Plan) -> str:
    return "samples/s" if plan.predicted.tokens_per_s is None else "tokens/s"


def _per_s(plan: Plan) -> float:
    return plan.predicted.tokens_per_s or plan.predicted.samples_per_s or 0.0


def _most(plan: Plan) -> int:
    """Return the memory of the fullest GPU."""
    return max(map(plan.memory_bytes, range(len(plan.stages))))
