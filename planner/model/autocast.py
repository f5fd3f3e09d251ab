"""Mixed precision: torch.autocast around each stage, because a captured graph does not record it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from planner.errors import InputError

_NAMES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


def autocasting(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """torch.autocast to `dtype`; nothing where it is None."""
    if dtype is None:
        return nullcontext()
    return torch.autocast("cuda" if device_type == "cuda" else "cpu", dtype)


def autocast_dtype(name: str | None) -> torch.dtype | None:
    """The type of that name; None for float32, which needs no autocast.

    Raises:
        InputError: for types that training cannot use.
    """
    if name in (None, "float32", "fp32"):
        return None
    if name not in _NAMES:
        raise InputError(
            f"training in {name} cannot be measured", hint="give float32 or bfloat16; float16 needs loss scaling"
        )
    return _NAMES[name]
