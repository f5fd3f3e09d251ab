"""Products of linear layers in 8 bits, as Transformer Engine trains with them.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", sections 3 and 4: all three products of a
linear layer have operands of 8 bits and sums of more. Attention, norms, the embedding, the head and
the optimizer keep the types that they have, weights of 16 bits with masters in float32 and
gradients that are summed in float32 among them. What a product reads is made of 8 bits first, once
for all that read it, by kernels that the memory bounds. Of an operand with e elements of 2 bytes

    fp8     one scale per tensor ("current scaling"): read it for its largest element; read it
            again, and write it; for the backward's products once more, transposed, where the GPU
            wants that
                2e + 2e + e (+ e)  bytes
    mxfp8   one scale per 32 elements, along the inner dimension, which is another one in the
            backward: read it once, and write both
                2e + 2 (1 + 1/32) e  bytes

Weights are cast where the optimizer makes them of their masters, in place of the copy in half
precision, so that they take no more time, and no more memory: 2 bytes per weight are the copy and
its transposed one, or those of the two scales. What a linear layer keeps of its input for the
backward has 8 bits; where attention keeps it too, both are kept. What recipes send in 8 bits, such
as gathered weights, counts in half precision.

Products whose sizes are no multiples of 16 stay as they are, as such kernels want that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.formats.files import replace
from planner.formats.names import EightBits
from planner.profiler.estimated.devices import DeviceSpec
from planner.profiler.estimated.loss_chunks import last_product
from planner.profiler.estimated.operations import LINEAR, Operation
from planner.profiler.step.counters import GROUPED

_HALVES = ("bfloat16", "float16")
_HALF_BYTES = 2
_ALIGNED = 16  # elements
_SCALES = 1 / 32  # bytes per element, of mxfp8


@dataclass(frozen=True)
class EightBitProducts:
    """How a step multiplies in 8 bits.

    Attributes:
        precision: the format.
        transposes: whether operands of the backward's products are copied transposed.
    """

    precision: EightBits
    transposes: bool

    @property
    def kept_bytes(self) -> float:
        """Bytes per element that a linear layer keeps of its input."""
        return 1 + _SCALES if self.precision == "mxfp8" else 1.0

    @property
    def cast_bytes(self) -> float:
        """Bytes per element that are moved to cast an operand."""
        if self.precision == "mxfp8":
            return _HALF_BYTES + 2 * self.kept_bytes
        return 2 * _HALF_BYTES + 1 + self.transposes

    @property
    def cast_launches(self) -> int:
        return 1 if self.precision == "mxfp8" else 2


def eight_bit_products(precision: EightBits, specs: Sequence[DeviceSpec]) -> EightBitProducts:
    """Return how these devices multiply; those of several kinds as the one that needs most."""
    rates = [spec.eight_bits for spec in specs]
    return EightBitProducts(
        precision, transposes=any(each is None or not each.any_layout for each in rates)
    )


@dataclass(frozen=True)
class EightBitStep:
    """The operations of a step with its linear layers in 8 bits.

    Attributes:
        operations: with those that cast.
        until: how many operations there are before each mark.
        saved_bytes: added to what is saved for the backward, by the number of the operation of the
            given ones that reads it.
    """

    operations: Sequence[Operation]
    until: Sequence[int]
    saved_bytes: dict[int, float]


def in_eight_bits(
    operations: Sequence[Operation], until: Sequence[int], backward: int, how: EightBitProducts
) -> EightBitStep:
    """Return a step with its linear layers in 8 bits, but for the head.

    Args:
        operations: in the order in which they run.
        until: how many of them run before each mark.
        backward: number of the first operation of the backward.
        how: they multiply.
    """
    products = set(_linear_products(operations, backward))
    changed = list[Operation]()
    casts = [0] * (len(operations) + 1)  # before each operation
    cast_values = set[int]()
    for number, operation in enumerate(operations):
        if number not in products:
            changed.append(operation)
            continue
        for value, size_bytes in operation.reads:
            if value >= 0 and value not in cast_values:
                cast_values.add(value)
                casts[number] += 1
                changed.append(_cast(size_bytes, operation, how))
        changed.append(_multiplied(operation, how))

    before = list(accumulate(casts))  # all casts up to and including those of an operation
    return EightBitStep(
        changed,
        [mark + (before[mark - 1] if mark else 0) for mark in until],
        _saved(operations, products, backward, how),
    )


def _linear_products(operations: Sequence[Operation], backward: int) -> list[int]:
    """Return the numbers of the products of linear layers, but for those of the head: the last one
    of the forward, and those of its sizes in the backward.
    """
    own = [
        number
        for number, operation in enumerate(operations)
        if operation.name in LINEAR and operation.dtype in _HALVES and _is_aligned(operation)
    ]
    last = last_product(operations, backward)
    if last is None:
        return own
    head = _sizes(operations[last])
    return [
        number
        for number in own
        if number != last and (number < backward or _sizes(operations[number]) != head)
    ]


def _sizes(operation: Operation) -> tuple[int, ...]:
    return tuple(sorted(operation.product or ()))


def _is_aligned(operation: Operation) -> bool:
    if operation.product is None:  # grouped by experts, whose rows are padded
        return True
    _, *sizes = operation.product
    return operation.name in GROUPED or all(size % _ALIGNED == 0 for size in sizes)


def _multiplied(operation: Operation, how: EightBitProducts) -> Operation:
    read_bytes = sum(size for _, size in operation.reads)
    saved_bytes = min(operation.bytes, read_bytes / _HALF_BYTES)
    return replace(operation, dtype=how.precision, bytes=operation.bytes - saved_bytes)


def _cast(size_bytes: int, product: Operation, how: EightBitProducts) -> Operation:
    return Operation(
        op_class="pointwise",
        flops=0.0,
        bytes=size_bytes / _HALF_BYTES * how.cast_bytes,
        dtype=product.dtype,
        launches=how.cast_launches,
        name="cast",
    )


def _saved(
    operations: Sequence[Operation], products: set[int], backward: int, how: EightBitProducts
) -> dict[int, float]:
    """Return what is saved more, or less, of what products of the forward read, by the first of
    these.
    """
    first = dict[int, tuple[int, int]]()  # by value: the product, and the bytes
    for number in sorted(products):
        if number < backward:
            for value, size_bytes in operations[number].reads:
                first.setdefault(value, (number, size_bytes))

    multiplied = set[int]()
    kept_otherwise = set[int]()
    for number in range(backward, len(operations)):
        values = {value for value, _ in operations[number].reads}
        (multiplied if number in products else kept_otherwise).update(values)

    more = dict[int, float]()
    for value, (number, size_bytes) in first.items():
        if value < 0 or value not in multiplied:
            continue
        in_half = 0 if value in kept_otherwise else size_bytes
        own = size_bytes / _HALF_BYTES * how.kept_bytes - in_half
        more[number] = more.get(number, 0.0) + own

    return more
