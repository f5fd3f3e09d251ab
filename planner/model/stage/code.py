"""Make a stage's generated code fast: with torch.compile, or else with functions that Python calls
faster.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.errors import InputError, first_line

Code = Callable[..., Any]


def compiled(code: Code, *, dynamic: bool = False) -> Code:
    """Return `code` through torch.compile, which compiles it at its first call: for its sizes, or
    `dynamic` for all.

    Compiled code is interrupted where a layer is seeded (`randomness.reseed`), and
    `fallback_random` makes it draw with PyTorch's own kernels: the same random numbers as without
    compilation.
    """
    return torch.compile(code, dynamic=dynamic, options={"fallback_random": True})


@cache
def check_compiler(device_type: str) -> None:
    """Compile a tiny function, to report in one sentence what this machine lacks."""
    try:
        compiled(lambda x: x.sin() + 1)(torch.ones(8, device=device_type))
    # whatever the tracer, the code generator or the compiler behind it raises
    except Exception as cause:
        needed = "Triton and gcc"
        if device_type == "cpu":
            needed = "a C++ compiler (g++ or clang++) and Python's headers"
        raise InputError(
            f"torch.compile does not work for {device_type} on this machine: {first_line(cause)}",
            hint=f"it needs {needed}; or profile without `compile`",
        ) from cause


_aten = torch.ops.aten

# PyTorch generates both from the same line of native_functions.yaml: same arguments, same defaults.
_ALIKE = """
    batch_norm cat conv2d dropout embedding layer_norm matmul max_pool2d permute relu relu_ reshape
    tanh unsqueeze
"""
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(_aten, name).default: getattr(torch, name) for name in _ALIKE.split()},
    _aten.add.Tensor: torch.add,
    _aten.add_.Tensor: Tensor.add_,
    _aten.flatten.using_ints: torch.flatten,
    _aten.gelu.default: F.gelu,
    _aten.linear.default: F.linear,
    _aten.mul.Tensor: torch.mul,
    _aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    _aten.transpose.int: torch.transpose,
    _aten.unbind.int: torch.unbind,
    _aten.unflatten.int: torch.unflatten,
    _aten.view.default: Tensor.view,
}
