"""zb-v: two chunks per worker in a V, and backwards in two parts.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (ZB-V; also Qi et al., "Zero Bubble
Pipeline Parallelism", ICLR 2024, section 6). Worker i of p runs the stages i and 2p-1-i, so the first worker has the
model's both ends: a microbatch's backward begins where its forward ended, and every worker holds about as much as the
first worker of 1F1B. Where forward and the two parts of the backward take equally long, no worker ever idles.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedule.chunked import Chunked, Work


class ZeroBubbleV(Chunked):
    """The V-shaped zero-bubble schedule.

    Worker i warms up with 2(p-i)-1 forwards of its first chunk, then i of both chunks in turn, then p-i forwards of its
    second chunk, each with its backward. Forward and backward of both chunks alternate from there on; at the end the
    gradients of activations go first, and those of weights fill the time in which others are waited for.
    """

    name = "zb-v"
    title = "zb-v, 2 chunks per GPU in a V, backwards in two parts, {microbatches} microbatches per minibatch"
    summary = "synchronous, two chunks of the model per GPU in a V, and the gradients of weights fill the bubble"
    holds = "about as much as the first stage of 1f1b, on every GPU"
    source = "Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024"
    splits_backward = True
    fixed_chunks = 2
    torch_name = "ScheduleZBVZeroBubble"

    def worker_of(self, stage: int, workers: int) -> int:
        return min(stage, 2 * workers - 1 - stage)

    def order(self, workers: int, chunks: int, position: int, units: int) -> Iterator[tuple[Work, int, int]]:
        # The order is that of enough microbatches to fill the pipeline; those that are not there are left out.
        return (each for each in _full_order(workers, position, max(units, 2 * workers - 1)) if each[2] < units)


def _full_order(workers: int, position: int, units: int) -> Iterator[tuple[Work, int, int]]:
    done = {(work, chunk): 0 for work in "FIW" for chunk in (0, 1)}

    def do(work: Work, chunk: int) -> tuple[Work, int, int]:
        done[work, chunk] += 1
        return work, chunk, done[work, chunk] - 1

    for _ in range(2 * (workers - position) - 1):
        yield do("F", 0)
    for _ in range(position):
        yield do("F", 1)
        yield do("F", 0)
    for _ in range(workers - position):
        yield do("F", 1)
        yield do("I", 1)
        yield do("W", 1)
    while done["F", 1] < done["F", 0] or done["F", 0] < units:
        if done["F", 0] < units:
            yield do("F", 0)
        yield do("I", 0)
        yield do("W", 0)
        yield do("F", 1)
        yield do("I", 1)
        yield do("W", 1)
    for _ in range(position):
        yield do("I", 0)
        yield do("I", 1)
    for _ in range(workers - position):
        yield do("I", 0)
        yield do("W", 0)
    for chunk in (1, 0):
        while done["W", chunk] < done["I", chunk]:
            yield do("W", chunk)


ZB_V = ZeroBubbleV()
