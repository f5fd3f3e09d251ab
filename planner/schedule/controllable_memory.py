"""v-half and v-min: two chunks per worker in a V, in a half or a third of the memory of 1F1B.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, sections 3 and 4. Every
microbatch does the same on a worker, one period after the microbatch before: a *building block*.
How long it lives there, from its forward to its backward, divided by the period, is the memory. A
period has six slots, for forward, gradients of activations and gradients of weights of both chunks,
which the paper takes as equally long.

    slot at which worker i of p begins      v-half            v-min
    forward of the first chunk              2i                i
    forward of the second chunk             3p - i - 2        2p - i - 1
    backward of the second chunk            3p + a + 2i - 1   2p + a + i
    backward of the first chunk             6p + a - i - 2    4p + a - i - 1
    a, so that no two fall on one slot      3 if 2 divides p  2 if 3 divides p
    most in flight, in chunks               about p + 2       about 2p/3 + 3

(1F1B has 2p in flight.) While the pipeline fills and drains, blocks leave slots empty. There the
authors move work to earlier slots as long as the peak of memory stays. `_Greedy` does that, slot by
slot, which also makes an order for few microbatches. Its bubble is that of their code
(github.com/sail-sg/zero-bubble-pipeline-parallelism, zbv_greedy.py) or a smaller one.
"""

import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from planner.schedule.chunked import Work
from planner.schedule.zb_v import VShaped

PERIOD = 6  # slots: three for each chunk
# What a microbatch does on a worker, in order: work, and chunk. Gradients of weights come after the
# backward of their chunk, in any slot that is empty.
_PASSES: tuple[tuple[Work, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("I", 0))
_FORWARDS = 2  # the first passes
_DOWN = (True, False, True, False)  # whether a pass goes from the first worker to the last

# For each worker, the slot at which each pass of the first microbatch begins.
Blocks = list[tuple[int, int, int, int]]
Step = tuple[Work, int, int]  # work, chunk and microbatch


class ControllableMemory(VShaped):
    """Base of the schedules that repeat a building block."""

    torch_differs = True

    @abstractmethod
    def blocks(self, workers: int) -> Blocks:
        """Return the building block."""

    def order(self, workers: int, chunks: int, position: int, units: int) -> Iterator[Step]:
        """See base class."""
        if units == 0:  # of more replicas than microbatches
            return
        for work, chunk, unit in _orders(self, workers, units)[position].steps():
            if position > 0 or chunk > 0 or work == "F":
                yield work, chunk, unit
            elif work == "W":
                # Nobody waits for gradients of the first stage. Its backward in one part, any
                # earlier, would delay what others wait for.
                yield "B", chunk, unit


class VHalf(ControllableMemory):
    """Half of the memory of 1F1B, and about half of its bubble."""

    name = "v-half"
    known_as = "V-Half"
    title = (
        "v-half, 2 chunks per GPU in a V, backwards in two parts, {microbatches} microbatches "
        "per minibatch"
    )
    summary = "synchronous, as zb-v with half of its activations, and some bubble"

    def blocks(self, workers: int) -> Blocks:
        """See base class."""
        apart = 3 if workers % 2 == 0 else 0
        return [
            (
                2 * i,
                3 * workers - i - 2,
                3 * workers + apart + 2 * i - 1,
                6 * workers + apart - i - 2,
            )
            for i in range(workers)
        ]


class VMin(ControllableMemory):
    """A third of the memory of 1F1B, and about the bubble of it.

    Where forward and the two parts of the backward differ in length, workers wait for each other
    with every microbatch, too.
    """

    name = "v-min"
    known_as = "V-Min"
    title = (
        "v-min, 2 chunks per GPU in a V, backwards in two parts, {microbatches} microbatches "
        "per minibatch"
    )
    summary = "synchronous, as zb-v with a third of its activations, and the bubble of 1f1b-flush"

    def blocks(self, workers: int) -> Blocks:
        """See base class."""
        apart = 2 if workers % 3 == 0 else 0
        return [
            (
                i,
                2 * workers - i - 1,
                2 * workers + apart + i,
                4 * workers + apart - i - 1,
            )
            for i in range(workers)
        ]


@dataclass(frozen=True)
class _Order:
    """What a worker does: some steps, a period over and over, and the steps that follow it."""

    first: list[Step]
    period: list[Step]
    times: int  # more, after the period in `first`
    microbatches: int  # of a period
    last: list[Step]

    def steps(self) -> Iterator[Step]:
        """Yield all of it."""
        yield from self.first
        for number in range(1, self.times + 1):
            for work, chunk, unit in self.period:
                yield work, chunk, unit + number * self.microbatches
        yield from self.last


@lru_cache(maxsize=256)
def _orders(schedule: ControllableMemory, workers: int, units: int) -> list[_Order]:
    """Return what each worker does: the shorter of two greedy schedules."""
    blocks = schedule.blocks(workers)
    tries = [_Greedy(blocks, units, early_forwards=early) for early in (False, True)]
    return min(tries, key=lambda each: each.slots).orders


class _Greedy:
    """Fills the slots of all workers one after the other.

    In each slot a worker does the pass that the building blocks have first, if what it needs is
    there. Otherwise it does gradients of weights that wait, and otherwise the first pass that can
    be done. No forward may raise the most that a worker has in flight above what the blocks have.

    Once the state of all workers repeats, for later microbatches, so does what they do: as many
    periods as there are microbatches for are not gone through again.

    Attributes:
        orders: of each worker.
        slots: until all is done.
    """

    def __init__(self, blocks: Blocks, units: int, *, early_forwards: bool) -> None:
        self._blocks = blocks
        self._units = units
        self._early_forwards = early_forwards
        self._limit = _most_in_flight(blocks, units)
        workers = range(len(blocks))
        self._done = [[0] * len(_PASSES) for _ in workers]  # microbatches, by worker and pass
        self._turns = [list(begin) for begin in blocks]  # the slots of the next ones in the blocks
        self._held = [0] * len(blocks)  # chunks in flight
        # pass and microbatch of the gradients of weights that wait
        self._waiting = [deque[tuple[int, int]]() for _ in workers]
        self._steps: list[list[Step]] = [[] for _ in workers]
        self.slots = 0
        self.orders = self._run()

    def _run(self) -> list[_Order]:
        seen: dict[object, tuple[int, int, list[int]]] = {}
        orders: list[_Order] = []
        while not self._finished():
            if not orders and all(done[-1] for done in self._done):
                state = self._state()
                if state in seen:
                    orders = self._skip(*seen[state])
                else:
                    lengths = [len(steps) for steps in self._steps]
                    seen[state] = self.slots, self._done[0][-1], lengths
            self._fill_slot()

        if not orders:
            return [_Order(steps, [], 0, 0, []) for steps in self._steps]
        return [
            _Order(order.first, order.period, order.times, order.microbatches, steps)
            for order, steps in zip(orders, self._steps, strict=True)
        ]

    def _finished(self) -> bool:
        every = all(done[-1] == self._units for done in self._done)
        return every and not any(self._waiting)

    def _state(self) -> object:
        """Return all that decides what follows, relative to the microbatch that ends next."""
        ended = self._done[0][-1]
        return tuple(
            (tuple(each - ended for each in done), tuple((k, unit - ended) for k, unit in waiting))
            for done, waiting in zip(self._done, self._waiting, strict=True)
        )

    def _skip(self, slot: int, ended: int, lengths: list[int]) -> list[_Order]:
        """Repeat what was done since a slot while no worker comes near its last microbatch."""
        microbatches = self._done[0][-1] - ended
        times = self._periods_left(microbatches)
        orders = [
            _Order(steps, steps[length:], times, microbatches, [])
            for steps, length in zip(self._steps, lengths, strict=True)
        ]

        self.slots += times * (self.slots - slot)
        self._move_on(times * microbatches)
        self._steps = [[] for _ in self._steps]
        return orders

    def _periods_left(self, microbatches: int) -> int:
        """Return how often a period of so many microbatches can be repeated."""
        if microbatches == 0:
            return 0
        foremost = max(max(done) for done in self._done)
        left = self._units - foremost - len(self._blocks)
        return max(0, left // microbatches)

    def _move_on(self, microbatches: int) -> None:
        """Bring all workers to the state that they have so many microbatches later."""
        slots = PERIOD * microbatches
        self._done = [[count + microbatches for count in done] for done in self._done]
        self._turns = [[turn + slots for turn in turns] for turns in self._turns]
        self._waiting = [
            deque((number, unit + microbatches) for number, unit in waiting)
            for waiting in self._waiting
        ]

    def _fill_slot(self) -> None:
        """Let every worker do something with what was there at the slot's beginning."""
        before = [list(done) for done in self._done]
        for worker in range(len(self._blocks)):
            number = self._choose(worker, before)
            if number is not None:
                self._do(worker, number)
            elif self._waiting[worker]:
                number, unit = self._waiting[worker].popleft()
                self._held[worker] -= 1
                self._steps[worker].append(("W", _PASSES[number][1], unit))

        self.slots += 1

    def _do(self, worker: int, number: int) -> None:
        work, chunk = _PASSES[number]
        unit = self._done[worker][number]
        self._done[worker][number] += 1
        self._turns[worker][number] += PERIOD
        if self._done[worker][number] == self._units:
            self._turns[worker][number] = sys.maxsize  # no microbatch is left
        self._steps[worker].append((work, chunk, unit))
        if number < _FORWARDS:
            self._held[worker] += 1
        else:
            self._waiting[worker].append((number, unit))

    def _choose(self, worker: int, before: list[list[int]]) -> int | None:
        """Return the pass that a worker does; None for gradients of weights, or nothing."""
        turns = self._turns[worker]
        number = turns.index(min(turns))
        if self._can_do(worker, number, before) and self._has_room(worker, number, in_turn=True):
            return number
        if self._waiting[worker]:
            return None

        for number in sorted(range(len(_PASSES)), key=turns.__getitem__):
            if self._can_do(worker, number, before) and self._has_room(worker, number):
                return number

        return None

    def _can_do(self, worker: int, number: int, before: list[list[int]]) -> bool:
        """Whether a pass is left whose microbatch has done all passes before it."""
        unit = self._done[worker][number]
        if unit == self._units:
            return False

        if number and before[worker][number - 1] <= unit:
            return False
        earlier = worker - 1 if _DOWN[number] else worker + 1
        return not 0 <= earlier < len(self._blocks) or before[earlier][number] > unit

    def _has_room(self, worker: int, number: int, *, in_turn: bool = False) -> bool:
        """Whether a pass leaves room for all that the blocks have before it."""
        if number >= _FORWARDS:
            return True
        if self._held[worker] >= self._limit:
            return False
        if in_turn:
            return True
        if not self._early_forwards:
            return False

        # All weights' gradients that wait can be done before what is in turn.
        held = self._held[worker] - len(self._waiting[worker])
        for is_forward in self._until(worker, self._turns[worker][number]):
            held += 1 if is_forward else -1
            if is_forward and held >= self._limit:
                return False

        return True

    def _until(self, worker: int, slot: int) -> list[bool]:
        """Return of each pass that is left before a slot, in turn, whether it is a forward."""
        left = [
            (at, number)
            for number, turn in enumerate(self._turns[worker])
            for at in range(turn, slot, PERIOD)
        ]
        return [number < _FORWARDS for _, number in sorted(left)]


def _most_in_flight(blocks: Blocks, units: int) -> int:
    """Return the most chunks that a worker has in flight where blocks follow one another, and
    gradients of weights take the first empty slots.
    """
    period = range(min(units, 2 * len(blocks) + 2))
    most = 0
    for begin in blocks:
        passes = {slot + PERIOD * unit: n for n, slot in enumerate(begin) for unit in period}
        held = waiting = 0
        for slot in range(max(passes) + 1):
            if slot in passes and passes[slot] < _FORWARDS:
                held += 1
            elif slot in passes:
                waiting += 1
            elif waiting:
                waiting -= 1
                held -= 1
            most = max(most, held)

    return most


V_HALF = VHalf()
V_MIN = VMin()
