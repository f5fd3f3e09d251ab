"""zb-v: two chunks per worker in a V, and backwards in two parts."""

from collections import Counter
from collections.abc import Iterator
from typing import cast

from planner.schedule.chunked import Chunked, Work


class ZeroBubbleV(Chunked):
    """The V-shaped zero-bubble schedule (Qi et al., Pipeline Parallelism with Controllable Memory,
    NeurIPS 2024).

    Worker i of p runs the stages i and 2p-1-i, so a microbatch's backward begins where its forward
    ended. It warms up with 2(p-i)-1 forwards of its first chunk, then i of both chunks in turn,
    then p-i forwards of its second chunk, each with its backward. Forward and backward of both
    chunks alternate from there on; at the end the gradients of activations go first, and those of
    weights fill the time in which others are waited for.
    """

    name = "zb-v"
    known_as = "zero bubble, ZB-V"
    title = (
        "zb-v, 2 chunks per GPU in a V, backwards in two parts, {microbatches} microbatches "
        "per minibatch"
    )
    summary = (
        "synchronous, two chunks of the model per GPU in a V; weight gradients fill the bubble"
    )
    splits_backward = True
    fixed_chunks = 2
    torch_name = "ScheduleZBVZeroBubble"

    def worker_of(self, stage: int, workers: int) -> int:
        return min(stage, 2 * workers - 1 - stage)

    def order(
        self, workers: int, chunks: int, position: int, units: int
    ) -> Iterator[tuple[Work, int, int]]:
        # The order is that of enough microbatches to fill the pipeline; those that are not there
        # are left out.
        return (
            each
            for each in _full_order(workers, position, max(units, 2 * workers - 1))
            if each[2] < units
        )


def _full_order(workers: int, position: int, units: int) -> Iterator[tuple[Work, int, int]]:
    done = Counter[tuple[Work, int]]()

    def do(steps: str) -> Iterator[tuple[Work, int, int]]:
        """Do steps such as "F0", a forward of chunk 0, each with the next unit."""
        for each in steps.split():
            step = cast("Work", each[0]), int(each[1])
            yield *step, done[step]
            done[step] += 1

    behind = workers - position
    yield from do("F0 " * (2 * behind - 1) + "F1 F0 " * position + "F1 I1 W1 " * behind)
    while done["F", 1] < done["F", 0] or done["F", 0] < units:
        yield from do("F0 " * (done["F", 0] < units) + "I0 W0 F1 I1 W1")
    yield from do("I0 I1 " * position + "I0 W0 " * behind)
    for chunk in (1, 0):
        yield from do(f"W{chunk} " * (done["I", chunk] - done["W", chunk]))


ZB_V = ZeroBubbleV()
