"""zb-v: two chunks per worker in a V, and backwards in two parts."""

from collections import Counter
from collections.abc import Iterator

from planner.schedule.chunked import Chunked, Work


class VShaped(Chunked):
    """Base of schedules with two chunks per worker in a V, and backwards in two parts.

    Worker i of p runs the stages i and 2p-1-i, so a microbatch's backward begins where its forward
    ended.
    """

    splits_backward = True
    fixed_chunks = 2
    torch_name = "ScheduleZBVZeroBubble"

    def worker_of(self, stage: int, workers: int) -> int:
        """See base class."""
        return min(stage, 2 * workers - 1 - stage)


class ZeroBubbleV(VShaped):
    """The V-shaped zero-bubble schedule (Qi et al., Pipeline Parallelism with Controllable Memory,
    NeurIPS 2024).

    Worker i of p warms up with 2(p-i)-1 forwards of its first chunk, then i of both chunks in turn,
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
    summary = "synchronous, as zb-h1, with two chunks of the model per GPU in a V"

    def order(
        self, workers: int, chunks: int, position: int, units: int
    ) -> Iterator[tuple[Work, int, int]]:
        """See base class."""
        # The order is that of enough microbatches to fill the pipeline; those that are not there
        # are left out.
        return (
            each
            for each in _full_order(workers, position, max(units, 2 * workers - 1))
            if each[2] < units
        )


def _full_order(workers: int, position: int, units: int) -> Iterator[tuple[Work, int, int]]:
    """Yield what worker `position` does for so many units: forwards (F), gradients of activations
    (I) and of weights (W), with the chunk and the unit.
    """
    done = Counter[tuple[Work, int]]()

    def do(work: Work, chunk: int) -> tuple[Work, int, int]:
        """Return a step with the next unit of its kind."""
        unit = done[work, chunk]
        done[work, chunk] += 1
        return work, chunk, unit

    def backward(chunk: int) -> Iterator[tuple[Work, int, int]]:
        yield do("I", chunk)
        yield do("W", chunk)

    # 1. Warm up.
    behind = workers - position
    for _ in range(2 * behind - 1):
        yield do("F", 0)
    for _ in range(position):
        yield do("F", 1)
        yield do("F", 0)

    for _ in range(behind):
        yield do("F", 1)
        yield from backward(1)

    # 2. Forward and backward of both chunks alternate.
    while done["F", 1] < done["F", 0] or done["F", 0] < units:
        if done["F", 0] < units:
            yield do("F", 0)
        yield from backward(0)
        yield do("F", 1)
        yield from backward(1)

    # 3. Gradients of activations go first, and those of weights fill the time.
    for _ in range(position):
        yield do("I", 0)
        yield do("I", 1)

    for _ in range(behind):
        yield from backward(0)
    for chunk in (1, 0):
        for _ in range(done["I", chunk] - done["W", chunk]):
            yield do("W", chunk)


ZB_V = ZeroBubbleV()
