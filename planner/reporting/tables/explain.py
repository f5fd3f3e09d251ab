"""The report of `plan explain`: sentences first, then tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.analysis.explain import Alternative, Explanation
from planner.formats.plan import GIVEN
from planner.formats.plan_parts import short_config
from planner.reporting.tables.plan import bottleneck_place, bound_words, simulated_words
from planner.reporting.tables.table import Table, table_of
from planner.units import as_fast, format_bytes, format_change, format_seconds

_NAMES = {
    "compute": "computation",
    "receive": "link, receiving",
    "send": "link, sending",
    "shared_link": "server's link",
    "cut_before": "transfer before",
    "cut_after": "transfer after",
}
_WORTH_A_SENTENCE = 0.005  # share of the time spent waiting
_ROUNDING = 1e-9  # relative slack that is only rounding


def explanation_report(explanation: Explanation) -> str:
    """Report what limits the plan, the slack of everything else, and the alternatives."""
    return "\n\n".join((sentences(explanation), *(table.text() for _, table in explanation_tables(explanation))))


def sentences(explanation: Explanation) -> str:
    """Say what limits the plan, whether it is optimal, and what would help."""
    bottleneck, seconds = explanation.bottleneck, explanation.seconds_per_minibatch
    lines = [
        f"The plan {short_config(explanation.config)} takes {format_seconds(seconds)} per minibatch, limited by "
        f"{bottleneck_place(bottleneck)}, which is busy {bottleneck.busy_s / seconds:.0%} of that."
    ]
    if explanation.waiting_s > _WORTH_A_SENTENCE * seconds:
        lines.append(
            f"For the other {format_seconds(explanation.waiting_s)} ({explanation.waiting_s / seconds:.0%}) it waits "
            "for messages or for other replicas."
        )
    lines.append(_optimality(explanation))
    lines += [_gain(alternative) for alternative in explanation.what_if]
    if not explanation.moves and len(explanation.memory) > 1:
        lines.append("No boundary was moved: the stages are not runs of consecutive layers, or several share a worker.")
    if explanation.out_of_time:
        lines.append("The time limit ended this: more may be gained, and moves or other configs may be missing.")
    return "\n".join(lines)


def _optimality(explanation: Explanation) -> str:
    solver = explanation.solver
    if solver.name == GIVEN:
        return "The stages were given: no search says how far from the fastest plan this is."
    if solver.status == "optimal":
        simulated = ", and in its simulation the plan is within 1% of that" if solver.simulated else ""
        bound = f"By the cost model no plan takes less than {format_seconds(solver.lower_bound_s)}"
        return f"{bound}: the search was exact{simulated}."
    less = f"B{bound_words(solver)[1:]}"
    if solver.simulated == 0:
        return f"{less}; the search did not decide whether a plan reaches that."
    return f"{less}.\nThe plan is {simulated_words(solver)}."


def _gain(alternative: Alternative) -> str:
    start, gain = f"With {alternative.what}", alternative.gain
    if gain is None:
        return f"{start} no plan would fit."
    if gain == 0:
        return f"{start} it would not be faster."
    faster = f"{gain:.1%} faster" if gain > 0 else f"{-gain:.1%} slower"
    faster = as_fast(1 + gain) if gain >= 1 else faster
    return f"{start} the plan would be {short_config(alternative.config or '')}, {faster}."


def explanation_tables(explanation: Explanation) -> list[tuple[str, Table]]:
    """Return the tables, each with a title."""
    seconds = explanation.seconds_per_minibatch
    uses = [
        {
            "stage": "" if use.stage is None else use.stage,
            "resource": _NAMES.get(use.resource, use.resource),
            "busy": format_seconds(use.busy_s),
            "of the time": f"{use.share:.1%}",
            "slack": format_seconds(seconds - use.busy_s if seconds - use.busy_s > _ROUNDING * seconds else 0.0),
        }
        for use in explanation.uses
    ]
    overheads = any(use.overhead_bytes for use in explanation.memory)
    memory = [
        {
            "stage": use.stage,
            "memory per GPU": format_bytes(use.bytes),
            "of it overhead": format_bytes(use.overhead_bytes) if overheads else None,
            "slack": "no limit" if use.slack_bytes is None else format_bytes(use.slack_bytes),
        }
        for use in explanation.memory
    ]
    moves = [
        {
            "boundary": f"{move.boundary} | {move.boundary + 1}",
            "moving": f"{move.layer} to stage {move.to_stage}",
            "per minibatch": format_seconds(move.seconds_per_minibatch),
            "time": format_change(move.slower),
            "fits": "yes" if move.fits else "no",
        }
        for move in explanation.moves
    ]
    others = [
        {
            "otherwise": other.what,
            "config": short_config(other.config or "none fits"),
            "per minibatch": "" if (each_s := other.seconds_per_minibatch) is None else format_seconds(each_s),
            "speed": "" if other.gain is None else format_change(other.gain),
        }
        for other in (explanation.next_best, *explanation.what_if)
        if other is not None
    ]
    titles: dict[str, Sequence[Mapping[str, object]]] = {
        "Busy times and slack": uses,
        "Memory and slack": memory,
        "Boundaries moved by one layer": moves,
        "Other plans and other clusters": others,
    }
    return [(title, table_of(rows)) for title, rows in titles.items() if rows]
