"""Sizes that depend on the batch: an int, or an expression in the number of samples."""

from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx

BATCH = sympy.Symbol("batch", integer=True, positive=True)

Size: TypeAlias = "int | sympy.Expr"


# Stages evaluate sizes for every microbatch, and sympy takes longer than a small layer: hence the caches.
@lru_cache(maxsize=4096)
def evaluate(size: Size, batch_size: int) -> int:
    """Return the size for a batch of `batch_size` samples."""
    return size if isinstance(size, int) else int(size.subs(BATCH, batch_size))


@lru_cache(maxsize=4096)
def evaluate_number(expression: sympy.Expr, batch_size: int) -> int | float | bool:
    """Return the value of a symbolic number of the graph for a batch of `batch_size` samples."""
    number = expression.subs(BATCH, batch_size)
    if number in (sympy.true, sympy.false):
        return bool(number)
    return int(number) if number.is_integer else float(number)


@lru_cache(maxsize=4096)
def samples_in(size: Size, value: int) -> int | None:
    """Return the batch size at which `size`, a multiple of it, is `value`; None for other sizes."""
    if isinstance(size, int):
        return None
    per_sample = size / BATCH
    return value // int(per_sample) if per_sample.is_Integer else None


def is_symbolic(value: object) -> bool:
    """Return whether `value` is a number that the graph computes from sizes."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


class SizeReader:
    """Rewrite the tracer's symbols in terms of the batch size; other symbols stand for sizes that depend on data."""

    def __init__(self, placeholders: list[fx.Node]) -> None:
        values = [node.meta.get("val") for node in placeholders]
        firsts: list[Any] = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()]
        symbols = (size.node.expr.free_symbols for size in firsts if isinstance(size, torch.SymInt))
        self._symbols = dict.fromkeys(set().union(*symbols), BATCH)

    @property
    def dynamic(self) -> bool:
        """Whether the graph is valid for any batch size."""
        return bool(self._symbols)

    def expression(self, value: Any) -> sympy.Expr | None:
        """Return the expression of a symbolic number; None when it depends on data."""
        expression = value.node.expr
        if not expression.free_symbols <= self._symbols.keys():
            return None
        return expression.xreplace(self._symbols)

    def sizes(self, tensor: torch.Tensor) -> tuple[Size, ...] | None:
        """Return the tensor's shape; None when it depends on data."""
        found = [size if isinstance(size, int) else self.expression(size) for size in tensor.shape]
        if any(size is None for size in found):
            return None
        return tuple(int(size) if size.is_Integer else size for size in map(sympy.sympify, found))
