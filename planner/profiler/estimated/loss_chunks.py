"""The head and the loss over a part of the tokens at a time, so that logits never exist whole.

The gradient of a loss that is a mean over tokens is made chunk by chunk in the forward, and what is
kept for the backward is that of the hidden states (Hsu et al. 2024, "Liger Kernel", section 3.2).
The products are the same, and as large for eight chunks of thousands of tokens; what exists of
logits is a part of them.
"""

from collections.abc import Iterator, Sequence

from planner.formats.files import replace
from planner.profiler.estimated.operations import LINEAR, Operation

_LARGE = 1 / 4  # of the logits: what is computed of them for each token and word
_Values = tuple[tuple[int, int], ...]


def in_chunks(operations: Sequence[Operation], backward: int, chunks: int) -> list[Operation]:
    """Return the operations with values of the logits' size that are as large as those of a chunk.

    Only for what they hold: times are those of the given operations.
    """
    head = last_product(operations, backward)
    if head is None or not operations[head].writes:
        return list(operations)
    logits_bytes = operations[head].writes[0][1]
    large = set(_large_values(operations[head:], _LARGE * logits_bytes))

    def parts(values: _Values) -> _Values:
        return tuple(
            (value, -(-size // chunks)) if value in large else (value, size)
            for value, size in values
        )

    return [
        replace(each, reads=parts(each.reads), writes=parts(each.writes)) for each in operations
    ]


def last_product(operations: Sequence[Operation], backward: int) -> int | None:
    """Return the number of the forward's last product of a linear layer, which is the head's; None
    where there is none.
    """
    products = (
        number
        for number in reversed(range(backward))
        if operations[number].name in LINEAR and operations[number].flops
    )
    return next(products, None)


def _large_values(operations: Sequence[Operation], least_bytes: float) -> Iterator[int]:
    """Yield the values of the logits' size, up to those that a product of the backward makes."""
    (logits, _), *_ = operations[0].writes
    large = {logits}
    yield logits
    for operation in operations[1:]:
        if operation.flops or large.isdisjoint(value for value, _ in operation.reads):
            continue
        for value, size in operation.writes:
            if size >= least_bytes:
                large.add(value)
                yield value
