"""How a model's modules run, besides what its layers compute: precision, memory layout, compilation.

Mixed precision is torch.autocast around each stage, because a captured graph does not record it. Devices differ in
which operations they cast: CUDA keeps softmax and norms in float32, the CPU does not.

In the channels-last memory format the channels of a pixel lie together in memory, which many kernels prefer. PyTorch
keeps the order of the dimensions and changes the strides. The model computes the same up to the order of sums, and its
results take over the format of inputs and weights.
"""

from __future__ import annotations

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
    """How modules are measured and trained; a profile and its plans carry the same.

    Attributes:
        autocast: the dtype that modules run under torch.autocast with; None for none.
        channels_last: whether weights and images are in channels-last order.
        compiled: whether each stage goes through torch.compile.
        device: the kind of device that modules run on: its rules say which dtypes values have under autocast.
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


def autocasting(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context of torch.autocast to `dtype`; one without effect for None."""
    if dtype is None:
        return nullcontext()
    # Devices that compute nothing, such as meta, follow the CPU's rules.
    return torch.autocast(device_type if device_type in known_kinds() else "cpu", dtype)


def autocast_name(dtype: torch.dtype | None) -> Autocast | None:
    """Return the name that profiles give to an autocast dtype."""
    if dtype is None:
        return None
    return "bfloat16" if dtype == torch.bfloat16 else "float16"


def autocast_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype called `name`; None for float32, which needs no autocast.

    Raises:
        InputError: for dtypes that training cannot use.
    """
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
    """Put the weights of `module` into channels-last format, in place: parameters stay the same objects.

    Unlike `module.to(memory_format=torch.channels_last)`, this covers weights of four and of five dimensions.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() in _FORMATS:
            tensor.data = channels_last(tensor.data)
