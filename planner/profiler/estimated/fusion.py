"""Fuse operations as compilers and libraries do: what one kernel passes to itself never reaches the memory.

Operations keep their place in the list, so that layers keep theirs. A fused one loses the bytes that it reads from its
own kernel, and those that it writes if nobody else reads them; only the first of a kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from planner.profiler.estimated.devices import OpClass
from planner.profiler.estimated.execution import Fusion
from planner.profiler.estimated.operations import Operation

_CHAINED: frozenset[OpClass] = frozenset({"pointwise", "special", "random", "norm"})
_AROUND_SOFTMAX = frozenset({"mul", "div", "masked_fill", "where", "add", "_to_copy"})

Together = Callable[[int, int], bool]


def fused(operations: Sequence[Operation], backward: int, fusion: Fusion | None) -> list[Operation]:
    """Return the operations with their bytes and launches after fusion.

    Args:
        backward: number of the first operation of the backward, which is a program of its own.
        fusion: what is fused; None for nothing.
    """
    if fusion is None:
        return list(operations)
    flow = _Flow(operations)
    together = _compiled(operations) if fusion == "compiler" else _apex(operations, flow, backward)
    groups = _groups(operations, backward, flow, together)
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    result = list(operations)
    for numbers in members.values():
        if len(numbers) > 1:
            for number, operation in _kernel([(number, operations[number]) for number in numbers], flow):
                result[number] = operation
    return result


@dataclass
class _Flow:
    """Who writes and who reads each value."""

    operations: Sequence[Operation]
    writer: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, operation in enumerate(self.operations):
            for value, _ in operation.reads:
                self.readers.setdefault(value, []).append(number)
            for value, _ in operation.writes:
                self.writer[value] = number

    def producers(self, number: int) -> list[int]:
        """Return the operations whose results this one reads."""
        return [self.writer[value] for value, _ in self.operations[number].reads if value in self.writer]

    def users(self, number: int) -> list[int]:
        """Return the operations that read a result of this one."""
        return [user for value, _ in self.operations[number].writes for user in self.readers.get(value, ())]


def _groups(operations: Sequence[Operation], backward: int, flow: _Flow, together: Together) -> list[int]:
    """Return for each operation the number of the first one of its kernel."""
    groups = list(range(len(operations)))
    for number in range(len(operations)):
        producers = flow.producers(number)
        for producer in sorted(producers, reverse=True):
            group = groups[producer]
            if (producer < backward) != (number < backward) or not together(producer, number):
                continue
            # What it needs besides must be there before the kernel starts: it may itself need the kernel's results.
            if all(other < group or groups[other] == group for other in producers):
                groups[number] = group
                break
    return groups


def _kernel(members: Sequence[tuple[int, Operation]], flow: _Flow) -> list[tuple[int, Operation]]:
    inside = {number for number, _ in members}
    made = {value for _, operation in members for value, _ in operation.writes}
    seen: set[int] = set()
    result = []
    for position, (number, operation) in enumerate(members):
        reads = [(value, size) for value, size in operation.reads if value not in made and value not in seen]
        seen.update(value for value, _ in reads)
        kept = [
            size
            for value, size in operation.writes
            if not (readers := flow.readers.get(value)) or not inside.issuperset(readers)
        ]
        moved = float(sum(size for _, size in reads) + sum(kept))
        launches = operation.launches if position == 0 else 0
        result.append((number, replace(operation, bytes=min(operation.bytes, moved), launches=launches)))
    return result


def _compiled(operations: Sequence[Operation]) -> Together:
    return lambda producer, number: (
        operations[producer].op_class in _CHAINED and operations[number].op_class in _CHAINED
    )


def _apex(operations: Sequence[Operation], flow: _Flow, backward: int) -> Together:
    """Fuse scaling and masks into softmax, the residual's addition into dropout, the gate into SiLU, and nothing else.

    GELU with its bias, and layer norm, are one operation each already: products add the bias.
    """
    kernel: dict[int, str] = {}
    for number in reversed(range(backward)):
        name = operations[number].name
        if name == "_softmax":
            kernel[number] = "softmax"
        elif name in _AROUND_SOFTMAX:
            users = [user for user in flow.users(number) if user < backward]
            if users and all(kernel.get(user) == "softmax" for user in users):
                kernel[number] = "softmax"
    for number, operation in enumerate(operations):
        name, producers = operation.name, flow.producers(number)
        names = {operations[each].name for each in producers}
        backward_of_softmax = any(kernel.get(each) == "softmax backward" for each in producers)
        if name == "native_dropout" or (name == "add" and "native_dropout" in names):
            kernel[number] = "dropout"
        elif name == "silu" or (name == "mul" and "silu" in names):
            kernel[number] = "gate"
        elif name == "_softmax_backward_data" or (name in _AROUND_SOFTMAX and backward_of_softmax):
            kernel[number] = "softmax backward"
    return lambda producer, number: kernel.get(producer) is not None and kernel.get(producer) == kernel.get(number)
