"""Order of work on a worker that holds several chunks of the model: the interleaved schedule.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2. K
workers hold v chunks each, stage i of K·v on worker i mod K. Microbatches go in groups of about K: a group passes a
worker's first chunk, then its second, and so on, the backwards from the last chunk to the first, so that the bubble is
that of chunks, not of whole workers. Worker p begins with (v-1)·K + 2·(K-1-p) forwards, and alternates from there on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache


def groups(units: int, workers: int) -> list[range]:
    """The microbatches 0 .. units-1 in groups of `workers`, or a few more each where that leaves a remainder."""
    count = max(1, units // workers)
    return [range(units * number // count, units * (number + 1) // count) for number in range(count)]


def interleave(workers: int, chunks: int, position: int, units: int) -> Iterator[tuple[bool, int, int]]:
    """Computations of the worker at `position` of the pipeline: (is it a forward, chunk, microbatch)."""
    forwards = [(chunk, unit) for group in groups(units, workers) for chunk in range(chunks) for unit in group]
    backwards = [
        (chunk, unit) for group in groups(units, workers) for chunk in reversed(range(chunks)) for unit in group
    ]
    largest = max(len(group) for group in groups(units, workers))
    ahead = min(len(forwards), (chunks - 1) * largest + 2 * (workers - 1 - position))
    for step in range(len(forwards) + ahead):
        if step < len(forwards):
            yield True, *forwards[step]
        if step >= ahead:
            yield False, *backwards[step - ahead]


@lru_cache(maxsize=4096)
def chunks_in_flight(workers: int, chunks: int, position: int, units: int) -> tuple[int, ...]:
    """Most microbatches between forward and backward, for each chunk of the worker at `position`."""
    flying, most = [0] * chunks, [0] * chunks
    for is_forward, chunk, _ in interleave(workers, chunks, position, units):
        flying[chunk] += 1 if is_forward else -1
        most[chunk] = max(most[chunk], flying[chunk])
    return tuple(most)
