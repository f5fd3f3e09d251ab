"""interleaved: K workers hold v chunks each, stage i of K·v on worker i mod K.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2.
Microbatches go in groups of about K: a group passes a worker's first chunk, then its second, and so on, the backwards
from the last chunk to the first, so that the bubble is that of chunks, not of whole workers. Worker p begins with
(v-1)·K + 2·(K-1-p) forwards, and alternates from there on.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedule.chunked import Chunked, Work


class Interleaved(Chunked):
    """Megatron-LM's interleaved 1F1B."""

    name = "interleaved"
    title = "interleaved, {chunks} chunks per GPU, {microbatches} microbatches per minibatch"
    summary = "synchronous, several chunks of the model per GPU"
    updates = "after all microbatches of a minibatch"
    holds = "about as many as 1f1b, of each of the GPU's chunks"
    source = "Narayanan et al., Megatron-LM, SC 2021, section 2.2"
    fixed_chunks = None
    torch_name = "ScheduleInterleaved1F1B"

    def order(self, workers: int, chunks: int, position: int, units: int) -> Iterator[tuple[Work, int, int]]:
        groups = _groups(units, workers)
        forwards = [(chunk, unit) for group in groups for chunk in range(chunks) for unit in group]
        backwards = [(chunk, unit) for group in groups for chunk in reversed(range(chunks)) for unit in group]
        largest = max(len(group) for group in groups)
        ahead = min(len(forwards), (chunks - 1) * largest + 2 * (workers - 1 - position))
        for step in range(len(forwards) + ahead):
            if step < len(forwards):
                yield "F", *forwards[step]
            if step >= ahead:
                yield "B", *backwards[step - ahead]


def _groups(units: int, workers: int) -> list[range]:
    """Return the microbatches in groups of `workers`, or a few more each where that leaves a remainder."""
    count = max(1, units // workers)
    return [range(units * number // count, units * (number + 1) // count) for number in range(count)]


INTERLEAVED = Interleaved()
