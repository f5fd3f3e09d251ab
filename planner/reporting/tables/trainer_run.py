"""What a run in another trainer's words comes to, and a better one in the same words."""

from planner.analysis.given_plan import missing_memory
from planner.analysis.limits import simulated_limits
from planner.formats.fit import TrainerRun
from planner.formats.plan import Plan
from planner.formats.plan_parts import config_words
from planner.reporting.tables import plan as words
from planner.reporting.tables.table import named_values
from planner.units import format_times


def trainer_run_report(run: TrainerRun) -> str:
    """Say how fast the given run is and what limits it, then what is better, and what was left
    out.
    """
    given = run.given
    rows: list[tuple[str, str | None]] = [
        ("as given", f"{_ways(given)}, {_speed(given)}"),
        ("limited by", _limited_by(given)),
        ("memory", missing_memory(given)),
        ("better", _better(run)),
        ("options", run.arguments if _in_one_line(run) else None),
        ("in the script", ", ".join(run.in_script) or None),
        ("not priced", _unknown(run)),
        ("note", "; ".join(run.remarks) or None),
    ]
    parts = [named_values(rows)]
    if run.arguments is not None and not _in_one_line(run):
        parts.append(f"these keys for {run.trainer}, others as they are:\n\n{run.arguments}")
    return "\n\n".join(parts)


def _in_one_line(run: TrainerRun) -> bool:
    return run.arguments is not None and "\n" not in run.arguments


def _ways(plan: Plan) -> str:
    """Write the degrees of a plan, what its replicas divide, and whether it recomputes."""
    first = plan.stages[0]
    parts = [config_words(plan.config)]
    if first.shards_optimizer:
        parts.append(first.sharding_words.removeprefix("data parallel, "))
    if any(stage.recomputes for stage in plan.stages):
        parts.append("recomputing")
    return ", ".join(parts)


def _speed(plan: Plan) -> str:
    used = plan.predicted.flop_utilisation
    share = "" if used is None else f", {used:.0%} of the GPUs' peak"
    return words.speed(plan) + share


def _limited_by(plan: Plan) -> str:
    limits = simulated_limits(plan)
    if limits is None:  # too large to be simulated again for this line
        return f"{words.bottleneck_place(plan.predicted.bottleneck)}, by the cost model"
    return f"{limits.place}, busy {limits.share:.0%} of the time; {limits.bubble:.0%} bubble"


def _better(run: TrainerRun) -> str:
    """Write "1.18x, at most 1.25x is possible: DP=8 TP=4, 5,000 tokens/s"."""
    most = run.most_speedup
    possible = "" if most is None else f"at most {format_times(most)} is possible"
    if run.better is None:
        return f"none was found; {possible}" if possible else "none was found"

    speedup = format_times(run.speedup or 1.0)
    if missing_memory(run.given):
        speedup = "fits"
        possible = ""
    gain = f"{speedup}, {possible}" if possible else speedup
    return f"{gain}: {_ways(run.better)}, {_speed(run.better)}"


def _unknown(run: TrainerRun) -> str | None:
    """Name the options that the price leaves out."""
    if not run.unknown:
        return None
    return f"{', '.join(run.unknown)}: not understood, so this is the price of a run without them"
