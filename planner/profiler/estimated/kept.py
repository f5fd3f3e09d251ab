"""What a step keeps from its forward to its backward, and holds besides, where kernels are fused.

A compiler that fuses chains of operations need not keep what a chain's backward reads: the kernel
of the backward computes it again from what the chain read. What is kept then is the cheapest set of
values from which all that the backward reads can be made without a product, as PyTorch's
partitioner finds it (Ansel et al. 2024, "PyTorch 2", section 5): a minimum cut.

    source -> values that a product or another kernel makes, and what the chains cannot make
    value  -> the values that operations of a chain make of it
    value  -> sink, where the backward reads it
    capacity of a value: its bytes

Values that a product of the backward reads are kept as they are: the kernel of a product computes
nothing again. Weights and the batch are there anyway, and cost nothing.

The bytes that a layer's forward or backward holds besides are those of values between their first
and last use, of all that are in memory at all: a fused kernel keeps its own values in registers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from planner.profiler.estimated.execution import Flow

_SOURCE, _SINK = "source", "sink"
Chained = Callable[[int], bool]
"""Whether an operation, by its number, is of a chain that may be computed again."""


@dataclass(frozen=True)
class Held:
    """What a step holds.

    Attributes:
        kept: bytes of each value that is kept for the backward.
        peaks: the most bytes of other values while each operation runs.
    """

    kept: Mapping[int, int]
    peaks: Sequence[int]


def held_unfused(flow: Flow) -> Held:
    """Return what a step holds whose operations are kernels of their own."""
    kept = {value: _size(flow, value) for value in _read_later(flow)}
    return Held(kept, _peaks(flow, kept, set(flow.writer)))


def held_fused(flow: Flow, kernels: Sequence[int], chained: Chained) -> Held:
    """Return what a step holds whose chains are fused.

    Args:
        flow: of the step.
        kernels: for each operation, the number of the first one of its kernel.
        chained: which operations may be computed again.
    """
    read_later = _read_later(flow)
    kept = {
        value
        for value, users in read_later.items()
        if not all(chained(user) for user in users) or not chained(flow.writer[value])
    }
    wanted = read_later.keys() - kept
    kept |= _cut(flow, wanted, kept, chained)
    outside = {
        value
        for value, writer in flow.writer.items()
        if value in kept
        or any(kernels[user] != kernels[writer] for user in flow.readers.get(value, ()))
    }
    sizes = {value: _size(flow, value) for value in kept}
    # What the backward computes again is in registers of its kernels.
    again = wanted - kept
    readers = {
        value: [user for user in users if value not in again or user < flow.backward]
        for value, users in flow.readers.items()
    }
    return Held(sizes, _peaks(flow, sizes, outside, readers))


def _read_later(flow: Flow) -> dict[int, list[int]]:
    """Return the operations of the backward that read a value of the forward, by value."""
    found = dict[int, list[int]]()
    for value, users in flow.readers.items():
        if flow.writer.get(value, flow.backward) < flow.backward:
            later = [user for user in users if user >= flow.backward]
            if later:
                found[value] = later
    return found


def _size(flow: Flow, value: int) -> int:
    return max(
        size for written, size in flow.operations[flow.writer[value]].writes if written == value
    )


def _cut(flow: Flow, wanted: set[int], kept: set[int], chained: Chained) -> set[int]:
    """Return the values to keep, beside those that are kept anyway, so that chains can make what is
    wanted.
    """
    graph: nx.DiGraph[object] = nx.DiGraph()
    seen = set[int]()
    todo = list(wanted)
    while todo:
        value = todo.pop()
        if value in seen or value in kept or value not in flow.writer:
            continue
        seen.add(value)
        writer = flow.writer[value]
        graph.add_edge((value, "in"), (value, "out"), capacity=_size(flow, value))
        if not chained(writer):
            graph.add_edge(_SOURCE, (value, "in"))
            continue
        for read, _ in flow.operations[writer].reads:
            if read in flow.writer and read not in kept:
                graph.add_edge((read, "out"), (value, "in"))
                todo.append(read)

    for value in wanted:
        graph.add_edge((value, "out"), _SINK)
    if _SOURCE not in graph or not wanted:
        return set()
    _, (near, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
    return {value for value in seen if (value, "in") in near and (value, "out") not in near}


def _peaks(
    flow: Flow,
    kept: Mapping[int, int],
    in_memory: set[int],
    readers: Mapping[int, Sequence[int]] | None = None,
) -> list[int]:
    """Return the bytes of values in memory that are not kept, while each operation runs.

    A value that nobody reads is a result, such as a gradient, which counts elsewhere.
    """
    users = flow.readers if readers is None else readers
    change = [0] * (len(flow.operations) + 1)
    for value, writer in flow.writer.items():
        if value in kept or value not in in_memory or not users.get(value):
            continue
        size = _size(flow, value)
        change[writer] += size
        change[max(users[value]) + 1] -= size

    peaks = []
    now = 0
    for difference in change[:-1]:
        now += difference
        peaks.append(now)

    return peaks
