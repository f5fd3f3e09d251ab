"""Compile stages with torch.compile, and check that this machine can."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch

from planner.errors import InputError, first_line

Code = Callable[..., Any]


def compiled(code: Code) -> Code:
    """Return `code` through torch.compile, which compiles it at its first call.

    The result draws the same random numbers as without compilation: compiled code is interrupted where a layer is
    seeded (`randomness.reseed`), and `fallback_random` makes it draw with PyTorch's own kernels.
    """
    return torch.compile(code, dynamic=False, options={"fallback_random": True})


def uncompiled(code: Code) -> Code:
    """Return `code` such that compiled code calls it as it is."""
    return cast(Code, torch.compiler.disable(code))  # type: ignore[no-untyped-call]


@cache
def check_compiler(device_type: str) -> None:
    """Compile a tiny function, to report in one sentence what this machine lacks.

    Raises:
        InputError: when torch.compile does not work for devices of this type.
    """
    try:
        compiled(_tiny)(torch.ones(8, device=device_type))
    except Exception as cause:  # whatever the tracer, the code generator or the compiler behind it raises
        needed = "a C++ compiler (g++ or clang++) and Python's headers" if device_type == "cpu" else "Triton and gcc"
        raise InputError(
            f"torch.compile does not work for {device_type} on this machine: {first_line(cause)}",
            hint=f"it needs {needed}; or profile without `compiled`",
        ) from cause


def _tiny(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1
