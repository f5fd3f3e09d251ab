"""Names of PyTorch without a promise, which capture and profiles need: all in this file, read in
PyTorch 2.13.

- `torch.utils._pytree`: batches, outputs and the arguments of operations are trees of lists, tuples
  and dicts. `torch.utils.pytree`, its public successor, is not there in 2.7.
- `torch.utils._python_dispatch`: a mode that sees each operation. PyTorch's own documentation of
  extensions tells users to import it from there.
- `torch._subclasses.fake_tensor`: tensors without data, and what they raise where a model decides
  by values. Its documentation, too, uses these names.
- `torch._ops`: the classes of operations in graphs, to tell them from Python's functions.
- `torch._C._functorch`: whether a tensor exists inside torch.vmap or torch.func only.
"""

from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
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
    "PyTree",
    "TorchDispatchMode",
    "TreeSpec",
    "disable_current_modes",
    "get_unwrapped",
    "is_functorch_wrapped_tensor",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]
