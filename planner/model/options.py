"""How a model's modules run, besides what its layers compute: precision, memory layout, compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from planner.model.autocast import autocast_dtype

if TYPE_CHECKING:
    from planner.formats.plan import Plan
    from planner.formats.profile import Profile


@dataclass(frozen=True)
class ModuleOptions:
    """How modules are measured and trained; a profile and its plans carry the same.

    Attributes:
        autocast: the dtype that modules run under torch.autocast with; None for none.
        channels_last: whether weights and images are in channels-last order (see `memory_format`).
        compiled: whether each stage goes through torch.compile.
        device: the kind of device that modules run on, "cpu" or "cuda": its rules say which dtypes values have under
            autocast.
    """

    autocast: torch.dtype | None = None
    channels_last: bool = False
    compiled: bool = False
    device: str = "cpu"


PLAIN = ModuleOptions()


def module_options(record: Profile | Plan) -> ModuleOptions:
    """Return the options that `record` was measured with, or is to be trained with."""
    channels_last = record.memory_format == "channels-last"
    return ModuleOptions(autocast_dtype(record.autocast), channels_last, bool(record.compiled), record.device.kind)
