"""Schedules as text, one line per worker: what tests and documents show is what runs."""

from __future__ import annotations

from planner.schedule.instructions import Backward, Forward, Unit, Update
from planner.schedule.streams import PipelineShape, stream


def draw_order(shape: PipelineShape, minibatches: int) -> list[str]:
    """Per worker the order of its computations: F forward, B backward, U update; "F1.0" is microbatch 0 of 1."""
    stage_of = {rank: stage for stage, ranks in enumerate(shape.ranks) for rank in ranks}
    return [
        " ".join(filter(None, (_symbol(shape, i) for i in stream(shape, stage_of[rank], rank, minibatches))))
        for rank in sorted(stage_of)
    ]


def _symbol(shape: PipelineShape, instruction: object) -> str | None:
    match instruction:
        case Forward(unit=unit):
            return f"F{_label(shape, unit)}"
        case Backward(unit=unit):
            return f"B{_label(shape, unit)}"
        case Update(round=round_):
            return f"U{round_}"
        case _:
            return None


def _label(shape: PipelineShape, unit: Unit) -> str:
    return str(unit.minibatch) if shape.microbatches == 1 else f"{unit.minibatch}.{unit.microbatch}"
