"""An explanation for people: plain sentences, then tables."""

from __future__ import annotations

from tabulate import tabulate

from planner.analysis.explain import Alternative, Explanation
from planner.report.tables.plan import RESOURCES
from planner.units import format_bytes, format_seconds

_NAMES = {
    "compute": "computation",
    "receive": "link, receiving",
    "send": "link, sending",
    "shared_link": "server's link",
    "cut_before": "transfer before",
    "cut_after": "transfer after",
}


def explanation_report(explanation: Explanation) -> str:
    """What limits the plan, what is left over, and what else there is."""
    parts = [sentences(explanation), _uses(explanation), _memory(explanation)]
    if explanation.moves:
        parts.append(_moves(explanation))
    elif len(explanation.memory) > 1:
        parts.append("No boundary was moved: the stages are no runs of consecutive layers, or several share a worker.")
    parts.append(_alternatives(explanation))
    return "\n\n".join(parts)


def sentences(explanation: Explanation) -> str:
    """What limits, whether it is optimal, and what would help."""
    bottleneck, seconds = explanation.bottleneck, explanation.seconds_per_minibatch
    place = RESOURCES[bottleneck.resource].format(stage=bottleneck.stage)
    lines = [
        f"The plan {explanation.config} takes {format_seconds(seconds)} per minibatch, limited by {place}, "
        f"which is busy {bottleneck.busy_s / seconds:.0%} of that."
    ]
    if explanation.waiting_s > 0.005 * seconds:
        lines.append(
            f"For {format_seconds(explanation.waiting_s)} of it ({explanation.waiting_s / seconds:.0%}) it waits for "
            "messages or for the other replicas of its round."
        )
    lines.append(_optimality(explanation))
    lines += [_gain(alternative) for alternative in explanation.what_if]
    return "\n".join(lines)


def _optimality(explanation: Explanation) -> str:
    solver = explanation.solver
    if solver.simulated == 0:
        if solver.status == "optimal":
            return "No plan is faster by this cost model: the search was exact."
        return (
            f"It may not be the fastest: none can take less than {format_seconds(solver.lower_bound_s)}, "
            f"which is {solver.gap:.1%} below it."
        )
    bound = f"By the cost model no plan takes less than {format_seconds(solver.lower_bound_s)}"
    if solver.status == "optimal":
        return f"{bound}: the search was exact, and the simulation of this plan is within 1% of that."
    which = "a candidate was" if solver.simulated == 1 else f"{solver.simulated} candidates were"
    left = "none was left" if solver.exhausted else "the work allowed for it was done, and some were left"
    return (
        f"{bound}; the simulation of this plan is {solver.gap:.1%} above that.\nIt may not be the fastest: "
        f"{which} simulated, after which {left} that could be faster by the cost model."
    )


def _gain(alternative: Alternative) -> str:
    start = f"With {alternative.what}"
    if alternative.gain is None:
        return f"{start} no plan would fit."
    if alternative.gain == 0:
        return f"{start} it would not be faster."
    return f"{start} the plan would be {alternative.config}, {_faster(alternative.gain)}."


def _faster(gain: float) -> str:
    return f"{gain:.1%} faster" if gain > 0 else f"{-gain:.1%} slower"


def _uses(explanation: Explanation) -> str:
    rows = [
        [
            use.stage,
            _NAMES.get(use.resource, use.resource),
            format_seconds(use.busy_s),
            f"{use.share:.1%}",
            format_seconds(max(0.0, explanation.seconds_per_minibatch - use.busy_s)),
        ]
        for use in explanation.uses
    ]
    headers = ["stage", "resource", "busy", "of the time", "slack"]
    return tabulate(rows, headers=headers, disable_numparse=True)


def _memory(explanation: Explanation) -> str:
    rows = [
        [use.stage, format_bytes(use.bytes), "no limit" if use.slack_bytes is None else format_bytes(use.slack_bytes)]
        for use in explanation.memory
    ]
    return tabulate(rows, headers=["stage", "memory per GPU", "slack"], disable_numparse=True)


def _moves(explanation: Explanation) -> str:
    rows = [
        [
            f"{move.boundary} | {move.boundary + 1}",
            f"{move.layer} to stage {move.to_stage}",
            format_seconds(move.seconds_per_minibatch),
            f"{move.slower:+.1%}",
            "yes" if move.fits else "no",
        ]
        for move in explanation.moves
    ]
    return tabulate(rows, headers=["boundary", "moving", "per minibatch", "time", "fits"], disable_numparse=True)


def _alternatives(explanation: Explanation) -> str:
    others = [explanation.next_best] if explanation.next_best else []
    rows = [
        [
            other.what,
            other.config or "none fits",
            "" if other.seconds_per_minibatch is None else format_seconds(other.seconds_per_minibatch),
            "" if other.gain is None else f"{other.gain:+.1%}",
        ]
        for other in (*others, *explanation.what_if)
    ]
    return tabulate(rows, headers=["otherwise", "config", "per minibatch", "speed"], disable_numparse=True)
