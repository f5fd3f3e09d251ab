"""Attention that a model writes out as products and a softmax, as one fused kernel.

    scores  = q · kᵀ        one product per head
    weights = softmax(scores · scale + mask or bias, beside sinks)
    result  = weights · v

Models with sinks, windows of their own or biases of positions write their attention out. Kernels
that take a function of the score (FlexAttention, Dong et al. 2024), or sinks and windows as
arguments (FlashAttention-3, cuDNN 9), never write scores to the memory. Such a chain is found by
its two products, between which nothing multiplies, and its backward by the four products that
belong to it:

    forward    2 products            multiplications of both
    backward   5 products            2.5 times those of the forward: the scores are computed again
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.formats.files import replace
from planner.profiler.estimated.execution import Flow
from planner.profiler.estimated.operations import ATTENTION_DIAGONAL_KEYS, Operation, narrow_heads

_PRODUCTS = ("bmm", "baddbmm")
_WIDEST_HEAD = 256
_BACKWARD_OF_FORWARD = 2.5


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees.

    Attributes:
        causal: none behind it.
        windows: for layers with windows, the keys that a query sees at most, in turn.
    """

    causal: bool = False
    windows: tuple[int | None, ...] = ()

    def share(self, keys: int) -> float:
        """Return the share of the keys that a kernel multiplies a query with, on average over
        layers.
        """
        windows = self.windows or (None,)
        return sum(self._share(keys, window) for window in windows) / len(windows)

    def _share(self, keys: int, window: int | None) -> float:
        seen = keys / 2 if self.causal else float(keys)
        if window is not None:
            seen = min(seen, float(window))
        diagonal = ATTENTION_DIAGONAL_KEYS / 2 if self.causal or window is not None else 0.0
        return min(1.0, (seen + diagonal) / keys)


def with_fused_attention(
    operations: Sequence[Operation], backward: int, mask: Mask
) -> list[Operation]:
    """Return the operations with each written-out attention as one kernel, forward and backward;
    those that it takes the place of do nothing.
    """
    result = list(operations)
    flow = Flow(operations, backward)
    for chain in _chains(flow):
        _fuse(result, flow, chain, mask)
    return result


@dataclass(frozen=True)
class _Chain:
    """The operations of an attention.

    Attributes:
        forward: all, the first product first and the last one last.
        behind: those of its backward.
    """

    forward: tuple[int, ...]
    behind: tuple[int, ...]


def _chains(flow: Flow) -> Iterator[_Chain]:
    taken = set[int]()
    for first, operation in enumerate(flow.operations[: flow.backward]):
        if first in taken or not _makes_scores(operation):
            continue
        inside = _until_product(flow, first)
        if inside is None:
            continue
        taken.update(inside)
        yield _Chain(inside, _behind(flow, inside))


def _makes_scores(operation: Operation) -> bool:
    if operation.name not in _PRODUCTS or operation.product is None:
        return False
    _, queries, keys, head = operation.product
    return head <= _WIDEST_HEAD < keys and queries > 1


def _until_product(flow: Flow, first: int) -> tuple[int, ...] | None:
    """Return the operations from one product to the next one that its results lead to; None where
    anything else reads them.
    """
    inside = [first]
    last = None
    todo = [first]
    while todo:
        for user in flow.users(todo.pop()):
            if user >= flow.backward or user in inside:
                continue
            operation = flow.operations[user]
            if operation.name in _PRODUCTS:
                if last not in (None, user):
                    return None
                last = user
            elif operation.flops:
                return None
            else:
                inside.append(user)
                todo.append(user)

    if last is None:
        return None
    return (*sorted(inside), last)


def _behind(flow: Flow, inside: Sequence[int]) -> tuple[int, ...]:
    """Return the operations of the backward: the product that reads the weights, the one that reads
    the same gradient, and what follows from that one, down to its products.
    """
    own = {value for number in inside[:-1] for value, _ in flow.operations[number].writes}
    start = [
        user
        for value in own
        for user in flow.readers.get(value, ())
        if user >= flow.backward and flow.operations[user].name in _PRODUCTS
    ]
    gradients = {
        value for number in start for value, _ in flow.operations[number].reads if value not in own
    }
    todo = [
        user
        for value in gradients
        for user in flow.readers.get(value, ())
        if user >= flow.backward and flow.operations[user].name in _PRODUCTS
    ]
    found = {*start, *todo}
    while todo:
        number = todo.pop()
        if number in start:
            continue
        for user in flow.users(number):
            if user in found:
                continue
            found.add(user)
            if flow.operations[user].name not in _PRODUCTS:
                todo.append(user)

    return tuple(sorted(found))


def _fuse(result: list[Operation], flow: Flow, chain: _Chain, mask: Mask) -> None:
    scores, weights = chain.forward[0], chain.forward[-1]
    count, queries, keys, head = flow.operations[scores].product or (0, 0, 0, 0)
    flops = 4.0 * count * queries * keys * head * mask.share(keys) * narrow_heads(head)
    results = flow.operations[weights].writes
    _replace(result, flow, chain.forward, weights, flops, ())
    if chain.behind:
        _replace(
            result, flow, chain.behind, chain.behind[-1], _BACKWARD_OF_FORWARD * flops, results
        )


def _replace(
    result: list[Operation],
    flow: Flow,
    members: Sequence[int],
    kernel: int,
    flops: float,
    also_read: tuple[tuple[int, int], ...],
) -> None:
    """Put the kernel in place of the last of its members; the others do nothing."""
    written = {value for number in members for value, _ in flow.operations[number].writes}
    inside = set(members)
    reads = {
        value: size
        for number in members
        for value, size in flow.operations[number].reads
        if value not in written
    }
    largest = _scores_bytes(flow, members)
    # Gradients of masks and masks themselves are as large as the scores: kernels make them.
    reads = {value: size for value, size in reads.items() if size < largest} | dict(also_read)
    writes = {
        value: size
        for number in members
        for value, size in flow.operations[number].writes
        if (size < largest and not inside.issuperset(flow.readers.get(value, ())))
        or (number == kernel and size < largest)
    }
    for number in members:
        plain = flow.operations[number]
        result[number] = replace(
            plain, flops=0.0, bytes=0.0, launches=0, product=None, reads=(), writes=()
        )

    moved = sum(reads.values()) + sum(writes.values())
    result[kernel] = Operation(
        op_class="attention",
        flops=flops,
        bytes=float(moved),
        dtype=flow.operations[kernel].dtype,
        name="attention",
        reads=tuple(reads.items()),
        writes=tuple(writes.items()),
    )


def _scores_bytes(flow: Flow, members: Sequence[int]) -> int:
    """Return the bytes of the scores: the most that a product of the members writes."""
    return max(
        size
        for number in members
        if flow.operations[number].name in _PRODUCTS
        for _, size in (*flow.operations[number].writes, *flow.operations[number].reads)
    )
