"""The tables of a plan's stages: what each has and does, what its GPUs hold, and how long it measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage, StageMemory
from planner.plan.blocks import BLOCK
from planner.report.tables.table import Table
from planner.units import format_bytes, format_seconds


class StageTime(Protocol):
    """What `planner.profiler.measured.verify` returns; a protocol, because this module must not import PyTorch."""

    @property
    def summed_s(self) -> float: ...

    @property
    def measured_s(self) -> float: ...

    @property
    def error(self) -> float: ...


def verify_report(plan: Plan, times: Sequence[StageTime]) -> str:
    """Compare the forward, backward and update of each stage for one microbatch."""
    rows = [
        [
            index,
            layer_range(stage.layers),
            format_seconds(time.summed_s),
            format_seconds(time.measured_s),
            f"{time.error:+.1%}",
        ]
        for index, (stage, time) in enumerate(zip(plan.stages, times, strict=True))
    ]
    table = Table(["stage", "layers", "sum of layers", "measured", "sum is off by"], rows).text()
    worst = max(times, key=lambda time: abs(time.error))
    return f"{table}\n\nworst stage: the sum of its layers is off by {worst.error:+.1%}"


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


MOST_RUNS = 4  # of consecutive ranks of a stage that are listed one by one


def late_updates(plan: Plan) -> list[int]:
    """List how many updates late each stage's gradients are."""
    late = plan.staleness
    return [late if plan.vertical_sync else plan.schedule.staleness(stage.in_flight) for stage in plan.stages]


def stage_table(plan: Plan) -> Table:
    """Tabulate the stages; columns in which nothing is to be said are left out."""
    headers = [
        "stage",
        "layers",
        "replicas",
        "of ranks",
        "ranks",
        "GPU",
        "in flight",
        "late",
        "compute",
        "accumulation",
        "sends",
    ]
    headers += ["optimizer", "recomputes"]
    late = late_updates(plan)
    model = [name for stage in plan.stages for name in stage.layers]
    rows = [
        [
            number,
            layer_range(stage.layers, model),
            stage.replicas,
            stage.tensor,
            ranks_line(stage),
            plan.cluster.kinds_on(stage.ranks),
            stage.in_flight,
            late[number],
            format_seconds(stage.compute_s),
            format_seconds(stage.accumulate_s),
            format_bytes(sum(sent_bytes(plan, number))),
            f"1/{stage.replicas}" if stage.sharded else "whole",
            recomputing(stage) or "nothing",
        ]
        for number, stage in enumerate(plan.stages)
    ]
    table = Table(headers, rows)
    if not any(late):
        table = table.without("late")
    # A replica's first backward after an update has no gradients to accumulate into, so one microbatch never does.
    if plan.microbatches == 1 or not any(stage.accumulate_s for stage in plan.stages):
        table = table.without("accumulation")
    if not any(stage.sharded for stage in plan.stages):
        table = table.without("optimizer")
    if not plan.cluster.kinds:
        table = table.without("GPU")
    if max(plan.degrees) == 1:
        table = table.without("of ranks")
    return table if any(stage.recomputes for stage in plan.stages) else table.without("recomputes")


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
    runs: list[list[int]] = []
    for rank in sorted(stage.ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    least = 2 if len(runs) > 1 else 3
    words = [f"{run[0]}-{run[-1]}" if len(run) >= least else ", ".join(map(str, run)) for run in runs]
    if len(words) > MOST_RUNS:
        words = [*words[:2], "...", words[-1]]
    return ", ".join(words)


def sent_bytes(plan: Plan, stage: int) -> tuple[int, int]:
    """Sum what a stage sends per microbatch: activations forward and gradients back."""
    forward = sum(transfer.output_bytes for transfer in plan.transfers if transfer.source == stage)
    back = sum(transfer.gradient_bytes for transfer in plan.transfers if transfer.target == stage)
    return forward, back


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
