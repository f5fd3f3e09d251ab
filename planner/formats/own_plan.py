"""A configuration that somebody chose by hand, as `plan price` takes it from a file."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from planner.errors import InputError
from planner.formats.files import Record, load_record
from planner.formats.plan import ScheduleField
from planner.formats.profile import Profile
from planner.schedule.defaults import CHUNKS
from planner.schedule.registry import DEFAULT

_REMEDY = "see the file of plan price in the file formats"
# "model.layers.3.mlp.up_proj" belongs to "model.layers.3": the outermost element of a list of modules.
_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


class OwnStage(Record):
    """One stage: how many of the model's blocks it has, or the names of its layers."""

    blocks: Annotated[int, Field(ge=1)] | None = None
    layers: tuple[str, ...] = ()  # as in the profile
    replicas: Annotated[int, Field(ge=1)] = 1
    recompute: bool = False  # runs its forward again before each backward

    @model_validator(mode="after")
    def _check_one(self) -> OwnStage:
        if (self.blocks is None) == (not self.layers):
            raise ValueError("a stage has either blocks or layers")
        return self


class OwnPlan(Record):
    """Stages in order, and the schedule that runs them."""

    schema_version: Literal[1] = 1
    stages: Annotated[tuple[OwnStage, ...], Field(min_length=1)]
    schedule: ScheduleField = Field(default=DEFAULT.name, validate_default=True)
    microbatches: Annotated[int, Field(ge=1)] | None = None  # per minibatch; None as `plan solve` chooses
    chunks: Annotated[int, Field(ge=1)] = CHUNKS  # stages per GPU, where the schedule leaves the choice


def load_own_plan(path: Path | str) -> OwnPlan:
    """Read a configuration.

    Raises:
        InputError: naming the file, the field and the value that is wrong.
    """
    return load_record(OwnPlan, path, InputError, _REMEDY)


def blocks_of(profile: Profile) -> list[range]:
    """Divide the layers into the model's blocks, by position: the elements of its lists of modules.

    Layers between two blocks belong to the earlier one, and those before the first block to the first. So an embedding
    runs with the first block and the head with the last, as in most training frameworks. A model without lists is a
    single block.
    """
    keys: list[str | None] = []
    for layer in profile.layers:
        found = _BLOCK.match(layer.name)
        keys.append(found[0] if found else (keys[-1] if keys else None))
    first = next((key for key in keys if key is not None), None)
    ends, blocks = 0, []
    for _, group in groupby(first if key is None else key for key in keys):
        start, ends = ends, ends + len(list(group))
        blocks.append(range(start, ends))
    return blocks
