"""Make a stage's generated code fast: with torch.compile, or else with less work for Python.

A captured graph calls `torch.ops.aten.linear.default`, which matches its arguments with the operation's schema at every
call; `torch.nn.functional.linear` is generated for these arguments. And where a captured graph has
`self.block.qkv.weight`, `nn.Module.__getattr__` searches at every dot. Both together took 7% of the forward of eight
small Transformer blocks on a CPU: 0.5 ms for 147 operations and 102 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from operator import getitem
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

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


_aten = torch.ops.aten

# PyTorch generates both from the same line of native_functions.yaml: same arguments, same defaults.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.add_.Tensor: Tensor.add_,
    _aten.batch_norm.default: torch.batch_norm,
    _aten.cat.default: torch.cat,
    _aten.conv2d.default: torch.conv2d,
    _aten.dropout.default: torch.dropout,
    _aten.embedding.default: torch.embedding,
    _aten.flatten.using_ints: torch.flatten,
    _aten.gelu.default: F.gelu,
    _aten.layer_norm.default: torch.layer_norm,
    _aten.linear.default: F.linear,
    _aten.matmul.default: torch.matmul,
    _aten.max_pool2d.default: torch.max_pool2d,
    _aten.mul.Tensor: torch.mul,
    _aten.permute.default: torch.permute,
    _aten.relu.default: torch.relu,
    _aten.relu_.default: torch.relu_,
    _aten.reshape.default: torch.reshape,
    _aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    _aten.tanh.default: torch.tanh,
    _aten.transpose.int: torch.transpose,
    _aten.unbind.int: torch.unbind,
    _aten.unflatten.int: torch.unflatten,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: Tensor.view,
}

Registry = dict[str, Any]


class Registries:
    """The registries of the modules that hold a stage's weights, made arguments of the code that looks weights up.

    This is safe because modules replace entries of their registries, when moved to a device for instance, but never the
    registries themselves.

    Args:
        weights: bare modules with the parameters and buffers.
        code: gets an argument for each of `values`.
    """

    def __init__(self, weights: nn.Module, names: Iterable[str], code: fx.Graph) -> None:
        self._code = code
        self._place: dict[str, tuple[fx.Node, str]] = {}
        arguments: dict[tuple[str, str], fx.Node] = {}
        values: list[Registry] = []
        for name in names:
            path, _, last = name.rpartition(".")
            holder = weights.get_submodule(path)
            kind = "_parameters" if last in holder._parameters else "_buffers"
            if (path, kind) not in arguments:
                arguments[path, kind] = code.placeholder(f"registry_{len(values)}")
                values.append(getattr(holder, kind))
            self._place[name] = arguments[path, kind], last
        self.values = tuple(values)

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def read(self, name: str) -> fx.Node:
        """Add to the code a node that looks up the weight `name`."""
        return self._code.create_node("call_function", getitem, self._place[name], name=name.replace(".", "_"))
