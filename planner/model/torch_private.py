"""Names of PyTorch without a promise, which capture, profiles and training need, each with its
reason; read in PyTorch 2.13.
"""

import torch
from torch import Tensor

# Whether a tensor exists inside torch.vmap or torch.func only.
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

# The classes of operations in graphs, to tell them from Python's functions.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# Tensors without data, and what they raise where a model decides by values. PyTorch's documentation
# of them uses these names.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# A mode that sees each operation. PyTorch's documentation of extensions tells users to import it
# from there.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# Batches, outputs and the arguments of operations are trees of lists, tuples and dicts. The public
# successor, torch.utils.pytree, is not there in 2.7.
from torch.utils._pytree import (
    PyTree,
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PyTree",
    "TorchDispatchMode",
    "TreeSpec",
    "copy_all",
    "disable_current_modes",
    "divide_all",
    "get_unwrapped",
    "is_functorch_wrapped_tensor",
    "multiply_all",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]


# One kernel for many tensors on a GPU: PyTorch's own optimizers call these, and nothing public
# does.


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target."""
    if targets:  # PyTorch refuses empty lists
        torch._foreach_copy_(targets, sources)


def multiply_all(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place by one number, or by a tensor of one element."""
    torch._foreach_mul_(tensors, factor)


def divide_all(tensors: list[Tensor], divisor: float) -> None:
    """Divide tensors in place by one number."""
    torch._foreach_div_(tensors, divisor)
