"""The layers that compute attention between its projections: scores, softmax and their product with
the values, or one kernel of all three.

They save most per second: scores and what softmax makes of them grow with the square of the length,
and no weight is multiplied (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 5). Of a fused kernel little is saved beside its result.
"""

from collections.abc import Iterable, Iterator, Sequence

from planner.formats.profile import Layer

_FUSED = {"aten.scaled_dot_product_attention", "MultiheadAttention"}
_SOFTMAX = {"aten.softmax", "aten._softmax", "Softmax"}
_PRODUCTS = {"aten.matmul", "aten.bmm", "aten.baddbmm", "aten.einsum"}
_BETWEEN = {"Dropout"}


def attention_groups(layers: Sequence[Layer], positions: Iterable[int]) -> list[frozenset[int]]:
    """Return the groups of consecutive layers, among those at some positions, that are attention.

    `nn.MultiheadAttention` is one layer, with its projections.
    """
    groups = []
    for run in _runs(layers, positions):
        operations = set[str]().union(*(_operations(layers[position]) for position in run))
        if operations & _FUSED or (operations & _SOFTMAX and operations & _PRODUCTS):
            groups.append(frozenset(run))
    return groups


def _runs(layers: Sequence[Layer], positions: Iterable[int]) -> Iterator[list[int]]:
    """Yield runs of layers that may be attention, without what only stands before or behind it."""
    run: list[int] = []
    for position in sorted(positions):
        follows = not run or position == run[-1] + 1
        if not (follows and _may_be_attention(layers[position])):
            yield from _trimmed(layers, run)
            run = []
        if _may_be_attention(layers[position]):
            run.append(position)

    yield from _trimmed(layers, run)


def _trimmed(layers: Sequence[Layer], run: Sequence[int]) -> Iterator[list[int]]:
    inside = [position for position in run if not _operations(layers[position]) <= _BETWEEN]
    if inside:
        yield list(range(inside[0], inside[-1] + 1))


def _may_be_attention(layer: Layer) -> bool:
    operations = _operations(layer)
    if operations <= _FUSED:
        return True
    return not layer.weight_bytes and operations <= _FUSED | _SOFTMAX | _PRODUCTS | _BETWEEN


def _operations(layer: Layer) -> set[str]:
    return set(layer.op.split("+"))
