"""torch.compile for stages: what it is told, and whether this machine can do it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch

from planner.errors import InputError

Code = Callable[..., Any]


def compiled(code: Code) -> Code:
    """`code` through torch.compile, which compiles it at its first call.

    A layer that draws random numbers is seeded before it does (`randomness.reseed`); the compiled code ends there and
    goes on behind, and draws with PyTorch's own kernels: the same numbers as without compilation.
    """
    return torch.compile(code, dynamic=False, options={"fallback_random": True})


def uncompiled(code: Code) -> Code:
    """`code` as it is, where compiled code calls it."""
    return cast(Code, torch.compiler.disable(code))  # type: ignore[no-untyped-call]


@cache
def check_compiler(device_type: str) -> None:
    """Compile a trifle, so that what is missing on this machine is said in one sentence.

    Raises:
        InputError: when it cannot be compiled for such devices.
    """
    try:
        compiled(_trifle)(torch.ones(8, device=device_type))
    except Exception as cause:  # whatever the tracer, the code generator or the compiler behind it raises
        needed = "a C++ compiler (g++ or clang++) and Python's headers" if device_type == "cpu" else "Triton and gcc"
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        raise InputError(
            f"torch.compile does not work for {device_type} on this machine: {lines[0]}",
            hint=f"it needs {needed}; or profile without --compile",
        ) from cause


def _trifle(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1
