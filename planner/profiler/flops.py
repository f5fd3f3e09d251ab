"""Count the model FLOPs of what runs: multiplications and additions of products, convolutions and attention.

They are those of the model's definition, as utilisation counts them (Chowdhery et al. 2022, PaLM, appendix B): causal
attention counts whole, though kernels leave out half of it. Recomputation does not count, nor what is only moved or
changed point by point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_VECTORS = ("mv", "addmv", "dot")
_FUSED_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn")
# Of mixtures of experts: each group of rows has its own matrix. The last is what Transformers does without the first.
GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback")
_OTHERS = ("_scaled_dot_product", *_VECTORS, *_FUSED_RECURRENT, *GROUPED)  # beside those that PyTorch counts


def of_dtensors(types: Sequence[type]) -> bool:
    """Return whether an operation is of DTensors: they run those of their parts, which count, instead."""
    return any(kind.__name__ == "DTensor" for kind in types)


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of a base class without types
    """Counts the operations that run within its context, on tensors with data or without.

    PyTorch's `FlopCounterMode` counts alike, but leaves out recurrent layers and products with vectors.

    Attributes:
        total: so far.
        until: the total at each mark.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.until: list[int] = []

    def mark(self, number: int) -> int:
        """End a span, and return its number: as many marks as this were made before."""
        assert number == len(self.until)
        self.until.append(self.total)
        return number

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if of_dtensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _counts(func):
            self.total += model_flops(func, args, kwargs, out)
        return out


@cache
def _counts(func: Any) -> bool:
    """Return whether calls of an operation may have FLOPs: most operations of a step have none."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return func._overloadpacket in flop_registry or func._schema.name.partition("::")[2].startswith(_OTHERS)


def model_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the number of multiplications and additions of one call, counted separately."""
    name = func._schema.name.partition("::")[2]
    if name.startswith("_scaled_dot_product"):
        # The kernels of the backward compute the scores again, which is no part of the model.
        backward = name.endswith("backward")
        shapes = (tensor.shape for tensor in (args[1:4] if backward else args[:3]))
        return int(sdpa_flop_count(*shapes)) * (2 if backward else 1)  # type: ignore[no-untyped-call]
    registered: Callable[..., Any] | None = flop_registry.get(func._overloadpacket)
    if registered is not None:
        return int(registered(*args, **kwargs, out_val=out))
    if name in _VECTORS:
        return 2 * max(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    if name.startswith(GROUPED):
        # Every number of the one is multiplied with a row of its group's matrix. Where the groups divide the other's
        # columns (3 and 2 dimensions), each number meets its own group's columns alone.
        one, other = args[0], args[1]
        groups = one.shape[0] if one.dim() == 3 and other.dim() == 2 else 1
        return int(2 * one.numel() * other.shape[-1] // groups)
    if name.startswith(_FUSED_RECURRENT) and "flatten" not in name and "init" not in name:
        return _recurrent(name, args)
    return 0


def _recurrent(name: str, args: tuple[Any, ...]) -> int:
    """Return those of a fused recurrent layer: every weight meets every step of every sample, in the backward twice."""
    sequence = args[0]
    weights = args[1] if isinstance(args[1], (list, tuple)) else args[1:3]
    met = sum(weight.numel() for weight in weights if weight is not None and weight.dim() == 2)
    products = 2 if name.endswith("backward") else 1
    return int(2 * products * sequence.shape[0] * sequence.shape[1] * met)
