"""Mixed precision: torch.autocast around each stage, because a captured graph does not record it.

Devices differ in which operations they cast: CUDA keeps softmax and norms in float32, the CPU does not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from planner.errors import InputError

if TYPE_CHECKING:
    from planner.formats.profile import Autocast

_NAMES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def autocasting(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context of torch.autocast to `dtype`; one without effect for None."""
    if dtype is None:
        return nullcontext()
    # Other devices, such as meta, follow the CPU's rules.
    return torch.autocast("cuda" if device_type == "cuda" else "cpu", dtype)


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
