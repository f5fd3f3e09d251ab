"""The tables of a plan's stages: what each has and does, and what its GPUs hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage, StageMemory
from planner.plan.blocks import BLOCK
from planner.reporting.tables.table import Table, table_of
from planner.units import format_bytes, format_seconds

_PARTS = tuple(name for name in StageMemory.model_fields if name.endswith("_bytes"))
MOST_RUNS = 4  # of consecutive ranks of a stage that are listed one by one


def memory_table(plan: Plan) -> Table:
    """Tabulate the memory per GPU and its parts; neighbouring stages that hold the same share a row.

    A GPU with several stages is in the row of the first of them.
    """
    ranks = [stage.ranks for stage in plan.stages]
    parts = {number: memory_parts(plan, number) for number, own in enumerate(ranks) if ranks.index(own) == number}
    shown = [name for name in _PARTS if any(sizes[name] for sizes in parts.values())]
    rows = []
    for cells, numbers in groupby(parts, key=lambda number: [format_bytes(parts[number][name]) for name in shown]):
        first, *others = numbers
        total = format_bytes(sum(parts[first].values()))
        rows.append([f"{first}-{others[-1]}" if others else f"{first}", total, *cells])
    headers = ["stage", "memory per GPU", *(name.removesuffix("_bytes").replace("_", " ") for name in shown)]
    return Table(headers, rows, "l" + "r" * (len(headers) - 1))


def memory_parts(plan: Plan, stage: int) -> dict[str, int]:
    """Return what each GPU that runs the stage holds, by use, with what its other stages hold."""
    held = [other.memory for other in plan.stages if other.ranks == plan.stages[stage].ranks]
    return {name: sum(getattr(memory, name) for memory in held) for name in _PARTS}


def stage_table(plan: Plan) -> Table:
    """Tabulate the stages; columns in which nothing is to be said are left out."""
    stages, model = plan.stages, [name for stage in plan.stages for name in stage.layers]
    late = [plan.staleness if plan.vertical_sync else plan.schedule.staleness(stage.in_flight) for stage in stages]
    # A replica's first backward after an update has no gradients to accumulate into, so one microbatch never does.
    accumulates = plan.microbatches > 1 and any(stage.accumulate_s for stage in stages)
    sharded, recomputes = any(stage.sharded for stage in stages), any(stage.recomputes for stage in stages)
    rows = [
        {
            "stage": number,
            "layers": layer_range(stage.layers, model),
            "replicas": stage.replicas,
            "of ranks": stage.tensor if max(plan.degrees) > 1 else None,
            "ranks": ranks_line(stage),
            "GPU": plan.cluster.kinds_on(stage.ranks) if plan.cluster.kinds else None,
            "in flight": stage.in_flight,
            "late": late[number] if any(late) else None,
            "compute": format_seconds(stage.compute_s),
            "accumulation": format_seconds(stage.accumulate_s) if accumulates else None,
            "sends": format_bytes(_sent_bytes(plan, number)),
            "optimizer": (f"1/{stage.replicas}" if stage.sharded else "whole") if sharded else None,
            "recomputes": (recomputing(stage) or "nothing") if recomputes else None,
        }
        for number, stage in enumerate(stages)
    ]
    return table_of(rows)


def recomputing(stage: Stage) -> str:
    """Return what of a stage recomputes, in words; empty for nothing."""
    if stage.recompute is True:
        return "all layers"
    groups, again = len(stage.recompute_groups), sum(map(len, stage.recompute_groups))
    if again <= groups:
        return f"{again} layer{'s' * (again > 1)}" if again else ""
    return f"{groups} block{'s' * (groups > 1)}, {again} layers"


def ranks_line(stage: Stage) -> str:
    """Write the ranks in ascending order: "0-3", "0, 2", or of many runs the first and the last: "0-1, 4-5, ...".

    Two consecutive ranks are a run among several of the same length only: "0, 1" alone.
    """
    # Within a run of consecutive ranks, rank minus place is the same.
    numbered = enumerate(sorted(stage.ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
    least = 2 if len(runs) > 1 else 3
    words = [f"{run[0]}-{run[-1]}" if len(run) >= least else ", ".join(map(str, run)) for run in runs]
    if len(words) > MOST_RUNS:
        words = [*words[:2], "...", words[-1]]
    return ", ".join(words)


def _sent_bytes(plan: Plan, stage: int) -> int:
    """Sum what a stage sends per microbatch: activations forward and gradients back."""
    forward = sum(transfer.output_bytes for transfer in plan.transfers if transfer.source == stage)
    return forward + sum(transfer.gradient_bytes for transfer in plan.transfers if transfer.target == stage)


def layer_range(layers: Sequence[str], model: Sequence[str] = ()) -> str:
    """Write the first and the last layer, and how many: "features.0 .. features.9 (10)".

    Blocks of `model`, the names of all layers, that are there as a whole are counted as such.
    """
    if len(layers) == 1:
        return layers[0]
    sizes, here = Counter(map(block_of, model)), Counter(map(block_of, layers))
    whole = {block for block, count in here.items() if block and 1 < count == sizes[block]}
    if len(whole) < 2:
        return f"{layers[0]} .. {layers[-1]} ({len(layers)})"
    others = sum(block_of(name) not in whole for name in layers)
    ends = [block if (block := block_of(name)) in whole else name for name in (layers[0], layers[-1])]
    counts = f"{len(whole)} blocks" + (f", {others} layer{'s' * (others > 1)}" if others else "")
    return f"{ends[0]} .. {ends[1]} ({counts})"


def block_of(name: str) -> str:
    """Return the block of a layer by its name; empty for none."""
    found = BLOCK.match(name)
    return found[0] if found else ""
