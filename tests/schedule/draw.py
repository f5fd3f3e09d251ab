"""Draw schedules as text, one line per worker."""

from __future__ import annotations

from planner.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Unit,
    Update,
)
from planner.schedule.schedule import PipelineShape, stream


def draw_order(shape: PipelineShape, minibatches: int) -> list[str]:
    """Return a line per worker with its computations: F forward, B backward, U update; "F1.0" is
    microbatch 0 of 1.

    Of a backward in two parts, B is what other stages wait for, W the rest.

    A worker's second chunk of the model is marked by ', its third by ''.
    """
    stage_of = shape.first_stages
    return [
        " ".join(
            filter(
                None, (_symbol(shape, i) for i in stream(shape, stage_of[rank], rank, minibatches))
            )
        )
        for rank in sorted(stage_of)
    ]


def _symbol(shape: PipelineShape, instruction: object) -> str | None:
    match instruction:
        case Forward(stage=stage, unit=unit):
            return f"F{_label(shape, unit)}{_chunk(shape, stage)}"
        case Backward(stage=stage, unit=unit) | BackwardInput(stage=stage, unit=unit):
            return f"B{_label(shape, unit)}{_chunk(shape, stage)}"
        case BackwardWeight(stage=stage, unit=unit):
            return f"W{_label(shape, unit)}{_chunk(shape, stage)}"
        case Update(stage=stage, round=round_):
            return f"U{round_}{_chunk(shape, stage)}"
        case _:
            return None


def _chunk(shape: PipelineShape, stage: int) -> str:
    return "'" * (stage // shape.pipeline_length)


def _label(shape: PipelineShape, unit: Unit) -> str:
    return str(unit.minibatch) if shape.microbatches == 1 else f"{unit.minibatch}.{unit.microbatch}"
