"""Sizes that depend on the batch: an int, or an expression in the number of samples and in lengths
that vary.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx

BATCH = sympy.Symbol("batch", integer=True, positive=True)

Size: TypeAlias = "int | sympy.Expr"
MOST_EXTENTS = 4096  # of which what follows from them is kept: there may be as many as batches
# the samples of a batch; where lengths vary, these after the samples
Extent: TypeAlias = "int | tuple[int, ...]"


def length_symbol(number: int) -> sympy.Symbol:
    """Return what stands for one of the lengths in expressions."""
    return sympy.Symbol(f"length_{number}", integer=True, positive=True)


@lru_cache(maxsize=MOST_EXTENTS)
def _function(expression: sympy.Expr, lengths: int) -> Callable[..., Any]:
    """Return the expression as a function of the extent: Python computes one a thousand times as
    fast as sympy.
    """
    symbols = (BATCH, *map(length_symbol, range(lengths)))
    polynomial = expression.as_poly(*symbols)
    if polynomial is not None and polynomial.domain.is_ZZ:
        # By itself it would import SciPy, where that is installed.
        return sympy.lambdify(symbols, expression, "math")  # type: ignore[no-any-return]
    return lambda *values: expression.xreplace(
        dict(zip(symbols, map(sympy.Integer, values), strict=True))
    )


@lru_cache(maxsize=MOST_EXTENTS)
def evaluate(size: Size, extent: Extent) -> int:
    """Return the size for a batch of this extent."""
    if isinstance(size, int):
        return size
    return int(_value(size, extent))


@lru_cache(maxsize=MOST_EXTENTS)
def evaluate_number(expression: sympy.Expr, extent: Extent) -> int | float | bool:
    """Return the value of a symbolic number of the graph for a batch of this extent."""
    number = _value(expression, extent)
    if isinstance(number, int):
        return number
    if number in (sympy.true, sympy.false):
        return bool(number)
    if number.is_integer:
        return int(number)
    return float(number)


def _value(expression: sympy.Expr, extent: Extent) -> Any:
    values = (extent,) if isinstance(extent, int) else extent
    return _function(expression, len(values) - 1)(*values)


@lru_cache(maxsize=4096)
def telling(sizes: tuple[Size, ...]) -> dict[sympy.Symbol, int]:
    """Return the symbols that sizes tell, each with the place of the size that tells it when those
    before are known.

    A size tells a symbol where it is linear in it and has no other that is unknown.
    """
    found: dict[sympy.Symbol, int] = {}
    symbolic = [(place, size) for place, size in enumerate(sizes) if not isinstance(size, int)]
    symbolic.sort(key=lambda pair: not pair[1].is_Symbol)  # nothing needs to be computed for these
    before = -1
    while before < len(found):
        before = len(found)
        for place, size in symbolic:
            unknown = size.free_symbols - found.keys()
            if len(unknown) != 1:
                continue
            (symbol,) = unknown
            is_linear = not size.diff(symbol).has(symbol)
            if is_linear:
                found[symbol] = place

    return found


def extent_told(sizes: tuple[Size, ...], values: Iterable[int], lengths: int) -> Extent:
    """Return the extent, with so many lengths, at which sizes have these values; 0 stands for what
    none tells.
    """
    numbers = list(values)
    known: dict[sympy.Symbol, int] = {}
    for symbol, place in telling(sizes).items():
        number = numbers[place]
        if sizes[place] == symbol:
            known[symbol] = number
            continue
        line = sympy.sympify(sizes[place]).subs(known)
        at_zero = line.subs(symbol, 0)
        known[symbol] = int((number - at_zero) / line.diff(symbol))

    samples = known.get(BATCH, 0)
    if not lengths:
        return samples
    return (samples, *(known.get(length_symbol(number), 0) for number in range(lengths)))


def is_symbolic(value: object) -> bool:
    """Return whether `value` is a number that the graph computes from sizes."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


class SizeReader:
    """Rewrite the tracer's symbols in terms of the batch; other symbols stand for sizes that depend
    on data.

    Its `places` say where in a batch each length is: the leaf and the dimension.
    """

    def __init__(self, placeholders: list[fx.Node]) -> None:
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self.places: list[tuple[int, int]] = []
        shapes = [_shape(node.meta.get("val")) for node in placeholders]
        for shape in shapes:
            if shape and is_symbolic(shape[0]):
                self._symbols |= dict.fromkeys(shape[0].node.expr.free_symbols, BATCH)

        for leaf, shape in enumerate(shapes):
            for dimension, size in enumerate(shape):
                # A size that is computed from another, such as a length and one, has that one's
                # symbol.
                symbol = size.node.expr if is_symbolic(size) else None
                if isinstance(symbol, sympy.Symbol) and symbol not in self._symbols:
                    self._symbols[symbol] = length_symbol(len(self.places))
                    self.places.append((leaf, dimension))

    @property
    def dynamic(self) -> bool:
        """Whether the graph is valid for any batch size."""
        return BATCH in self._symbols.values()

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


def _shape(value: object) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return value.shape
    return ()
