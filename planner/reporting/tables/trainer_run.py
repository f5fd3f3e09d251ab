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
    line = None
    keys = None
    if run.arguments is not None:
        if "\n" in run.arguments:
            keys = f"these keys for {run.trainer}, others as they are:\n\n{run.arguments}"
        else:
            line = run.arguments

    rows: list[tuple[str, str | None]] = [
        ("as given", f"{_ways(given)}, {_speed(given)}"),
        ("limited by", _limited_by(given)),
        ("memory", missing_memory(given)),
        ("better", _better(run)),
        ("options", line),
        ("in the script", ", ".join(run.in_script) or None),
        ("not priced", _unknown(run)),
        ("note", "; ".join(run.remarks) or None),
    ]
    if keys is None:
        return named_values(rows)
    return f"{named_values(rows)}\n\n{keys}"


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
    if used is None:
        return words.speed(plan)
    return f"{words.speed(plan)}, {used:.0%} of the GPUs' peak"


def _limited_by(plan: Plan) -> str:
    limits = simulated_limits(plan)
    if limits is None:  # too large to be simulated again for this line
        return f"{words.bottleneck_place(plan.predicted.bottleneck)}, by the cost model"
    return f"{limits.place}, busy {limits.share:.0%} of the time; {limits.bubble:.0%} bubble"


def _better(run: TrainerRun) -> str:
    """Write "1.18x, at most 1.25x is possible: DP=8 TP=4, 5,000 tokens/s"."""
    possible = ""
    if run.most_speedup is not None:
        possible = f"at most {format_times(run.most_speedup)} is possible"

    if run.better is None:
        if not possible:
            return "none was found"
        return f"none was found; {possible}"

    gain = _gain(run, possible)
    return f"{gain}: {_ways(run.better)}, {_speed(run.better)}"


def _gain(run: TrainerRun, possible: str) -> str:
    """Say what the better plan gains: that it fits, where the given one does not."""
    if missing_memory(run.given):
        return "fits"
    speedup = format_times(run.speedup or 1.0)
    if not possible:
        return speedup
    return f"{speedup}, {possible}"


def _unknown(run: TrainerRun) -> str | None:
    """Name the options that the price leaves out."""
    if not run.unknown:
        return None
    return f"{', '.join(run.unknown)}: not understood, so this is the price of a run without them"
