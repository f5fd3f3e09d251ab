"""How stages run besides what their layers say: precision, memory order, compilation. Profile and plan carry it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from planner.model.stage.autocast import autocast_dtype

if TYPE_CHECKING:
    from planner.formats.plan import Plan
    from planner.formats.profile import Profile


@dataclass(frozen=True)
class StageOptions:
    """What was measured, and is trained.

    Attributes:
        autocast: the type that stages run under torch.autocast with; None for none.
        channels_last: whether images lie in memory pixel by pixel (see `memory_format`).
        compiled: whether each stage goes through torch.compile.
    """

    autocast: torch.dtype | None = None
    channels_last: bool = False
    compiled: bool = False


PLAIN = StageOptions()


def options_of(record: Profile | Plan) -> StageOptions:
    """What `record` was measured with, or is to be trained with."""
    return StageOptions(autocast_dtype(record.autocast), record.memory_format == "channels-last", bool(record.compiled))
