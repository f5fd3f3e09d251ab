"""The table of a plan's memory: what each GPU holds, by use."""

from __future__ import annotations

from itertools import groupby

from planner.formats.plan import Plan
from planner.formats.plan_parts import StageMemory
from planner.report.tables.table import Table
from planner.units import format_bytes

_PARTS = tuple(name for name in StageMemory.model_fields if name.endswith("_bytes"))


def memory_table(plan: Plan) -> Table:
    """Tabulate the memory per GPU and its parts; neighbouring stages that hold the same share a row.

    A GPU with several stages is in the row of the first of them.
    """
    parts = {number: memory_parts(plan, number) for number in _first_stages(plan)}
    shown = [name for name in _PARTS if any(sizes[name] for sizes in parts.values())]
    rows = []
    for cells, numbers in groupby(parts, key=lambda number: [format_bytes(parts[number][name]) for name in shown]):
        first, *others = numbers
        rows.append([f"{first}-{others[-1]}" if others else f"{first}", _total(parts[first]), *cells])
    headers = ["stage", "memory per GPU", *(name.removesuffix("_bytes").replace("_", " ") for name in shown)]
    return Table(headers, rows, "l" + "r" * (len(headers) - 1))


def memory_parts(plan: Plan, stage: int) -> dict[str, int]:
    """Return what each GPU that runs the stage holds, by use, with what its other stages hold."""
    ranks = plan.stages[stage].ranks
    held = [other.memory for other in plan.stages if other.ranks == ranks]
    return {name: sum(getattr(memory, name) for memory in held) for name in _PARTS}


def _first_stages(plan: Plan) -> list[int]:
    """List the stages whose workers run no earlier one."""
    ranks = [stage.ranks for stage in plan.stages]
    return [number for number, own in enumerate(ranks) if ranks.index(own) == number]


def _total(parts: dict[str, int]) -> str:
    return format_bytes(sum(parts.values()))
