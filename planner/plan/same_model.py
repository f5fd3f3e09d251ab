"""Compare a plan with the model, or with the profile, that it is to be used with: a plan may have
been edited.

A plan that lacks a layer, or has two of them the other way round, still has streams that run to
their end. So it is compared before anything starts: its stages are the model's layers, each once,
in order within a stage and after all that they need, and its transfers are what the model's values
make of these stages.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise, zip_longest

from planner.errors import PlanError
from planner.formats.plan import REMEDY, Plan
from planner.formats.profile import Edge
from planner.plan.sums import Sum, check_sums

Ends = tuple[int, int]  # the stage that sends, and the one that receives


def check_same_model(
    plan: Plan,
    layers: Sequence[str],
    edges: Iterable[Edge],
    constants: Collection[str] = (),
    sums: Iterable[Sum] = (),
) -> None:
    """Raise PlanError, naming the first difference, unless the plan's stages are these layers.

    Args:
        layers: of the model, in order.
        edges: which layers use the values of which.
        constants: values that each stage makes itself; older plans send them.
        sums: gradients that must add up as in one process.
    """
    edges = list(edges)
    problem = (
        _layers_differ(plan, layers)
        or _needs_later(plan, edges)
        or _transfers_differ(plan, edges, constants)
    )
    if problem is not None:
        raise PlanError(f"the plan is not one of the model '{plan.model}': {problem}", hint=REMEDY)
    check_sums(plan, sums)


def expected_transfers(
    stages: Sequence[Sequence[str]],
    edges: Iterable[Edge],
) -> dict[Ends, list[str]]:
    """Return the values that stages of these layers exchange: each goes to its first user, and on
    to the next.
    """
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage}
    users: dict[tuple[str, str], set[int]] = {}
    for edge in edges:
        value = edge.source, edge.value
        users.setdefault(value, {stage_of[edge.source]}).add(stage_of[edge.target])

    found: dict[Ends, list[str]] = {}
    for (_, name), numbers in users.items():
        for ends in pairwise(sorted(numbers)):
            found.setdefault(ends, []).append(name)

    return found


def _layers_differ(plan: Plan, layers: Sequence[str]) -> str | None:
    planned = list(chain.from_iterable(stage.layers for stage in plan.stages))
    if sorted(planned) == sorted(layers):
        return _order_differs(plan, layers)
    for expected, name in zip_longest(layers, planned):
        if name is None:
            return f"no stage has the layer '{expected}'"
        if expected is None:
            return f"its last stage goes on with '{name}' behind the model's last layer"
        if name != expected:
            return f"it has the layer '{name}' where the model has '{expected}'"

    return None


def _order_differs(plan: Plan, layers: Sequence[str]) -> str | None:
    """Return which layers of a stage are not in the model's order, or that the last one is not at
    the end.
    """
    position = {name: place for place, name in enumerate(layers)}
    for stage in plan.stages:
        in_order = sorted(stage.layers, key=position.__getitem__)
        for expected, name in zip(in_order, stage.layers, strict=True):
            if name != expected:
                return f"it has the layer '{name}' where the model has '{expected}'"

    last = plan.stages[-1].layers[-1]
    if last == layers[-1]:
        return None
    return f"it has the layer '{last}' where the model has '{layers[-1]}'"


def _needs_later(plan: Plan, edges: Iterable[Edge]) -> str | None:
    """Return which layer needs a value that a later stage makes."""
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    for edge in edges:
        made = stage_of[edge.source]
        used = stage_of[edge.target]
        if made > used:
            return (
                f"stage {used} has the layer '{edge.target}', which needs '{edge.source}' of "
                f"stage {made}"
            )

    return None


def _transfers_differ(
    plan: Plan,
    edges: Iterable[Edge],
    constants: Collection[str],
) -> str | None:
    expected = expected_transfers([stage.layers for stage in plan.stages], edges)
    planned = {(each.source, each.target): each.values for each in plan.transfers}
    for source, target in sorted({*expected, *planned}):
        between = f"stage {source} to stage {target}"
        needed = expected.get((source, target), [])
        sent = planned.get((source, target), ())
        missing = [name for name in needed if name not in sent]
        unknown = [name for name in sent if name not in needed and name not in constants]
        if missing:
            return f"it does not send the value '{missing[0]}' from {between}"
        if unknown:
            return f"it sends a value '{unknown[0]}' from {between}, which do not exchange one"
        if len(set(sent)) < len(sent):
            return f"it sends a value twice from {between}: {', '.join(sent)}"

    return None
