"""How a model's modules run, besides what its layers compute: precision, memory layout, compilation.

Mixed precision is torch.autocast around each stage, because a captured graph does not record it.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from planner.errors import InputError
from planner.runtime import known_kinds

if TYPE_CHECKING:
    from planner.formats.plan import Plan
    from planner.formats.profile import Autocast, Profile

_NAMES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16}
# By the number of dimensions: samples, channels, and two or three of space.
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class ModuleOptions:
    """How modules are measured and trained; a profile and its plans carry the same."""

    autocast: torch.dtype | None = None  # that modules run under torch.autocast with
    channels_last: bool = False  # whether weights and images are in channels-last order
    compiled: bool = False  # whether each stage goes through torch.compile
    device: str = "cpu"  # kind that modules run on: its rules say which dtypes values have under autocast


PLAIN = ModuleOptions()


def module_options(record: "Profile | Plan") -> ModuleOptions:
    """Return the options that `record` was measured with, or is to be trained with."""
    channels_last = record.memory_format == "channels-last"
    return ModuleOptions(autocast_dtype(record.autocast), channels_last, bool(record.compiled), record.device.kind)


def autocasting(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context of torch.autocast to `dtype`; one without effect for None."""
    if dtype is None:
        return nullcontext()
    # Devices that compute nothing, such as meta, follow the CPU's rules.
    return torch.autocast(device_type if device_type in known_kinds() else "cpu", dtype)


def autocast_name(dtype: torch.dtype | None) -> "Autocast | None":
    """Return the name that profiles give to an autocast dtype."""
    return None if dtype is None else "bfloat16" if dtype == torch.bfloat16 else "float16"


def autocast_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype called `name`; None for float32, which needs no autocast, and an error for others."""
    if name in (None, "float32", "fp32"):
        return None
    if name not in _NAMES:
        raise InputError(f"training in {name} cannot be measured", hint="give float32, bfloat16 or float16")
    return _NAMES[name]


def channels_last(tensor: Tensor) -> Tensor:
    """Return `tensor` with its channels innermost in memory; itself if they are, or if it has no channels."""
    memory_format = _FORMATS.get(tensor.dim())
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)


def lay_out(module: nn.Module) -> None:
    """Put the weights of `module`, of four or five dimensions, into channels-last format, in place."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() in _FORMATS:
            tensor.data = channels_last(tensor.data)
