"""Schedules with one stage per worker: 1f1b and 2bw, and those that drain the pipeline before every
update.
"""

from collections import deque
from collections.abc import Iterator

from planner.schedule.instructions import AllReduce, BackwardWeight, Instruction, Unit, Update
from planner.schedule.pieces import (
    add_shared,
    backward,
    finish_minibatch,
    forward,
    one_forward_one_backward,
    send_shared,
)
from planner.schedule.schedule import (
    Count,
    PipelineShape,
    Schedule,
    Synchronous,
    warm_up_depth,
    warm_up_depths,
)


class Flush(Synchronous):
    """PipeDream-Flush: 1F1B within each minibatch (Narayanan et al., PipeDream-2BW, ICML 2021,
    section 3.2).
    """

    name = "1f1b-flush"
    known_as = "Megatron's 1F1B, which drains"
    title = "1f1b-flush, {microbatches} microbatches per minibatch"
    summary = "synchronous, the 1F1B of Megatron and PyTorch, drains before each update"
    deepens = True

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        """See base class."""
        most = -(-microbatches // replicas)
        depth = warm_up_depth(replicas, gpus_after)
        return most + (depth - most) * (depth < most)  # the lesser of the two, also for arrays

    def minibatch(
        self, shape: PipelineShape, stage: int, rank: int, minibatch: int
    ) -> Iterator[Instruction]:
        """See base class."""
        mine = shape.units_of(stage, rank, minibatch)
        for is_forward, index in one_forward_one_backward(len(mine), shape.in_flight(stage)):
            if is_forward:
                yield from forward(shape, stage, mine[index])
            else:
                yield from backward(shape, stage, mine[index], last_of_round=index == len(mine) - 1)
        yield from finish_minibatch(shape, [stage], rank, minibatch)


FLUSH = Flush()


class DoubleBuffered(Schedule):
    """PipeDream-2BW (Narayanan et al., ICML 2021, section 3.1): minibatch t runs at the version
    that t - 2 left.
    """

    name = "2bw"
    known_as = "PipeDream-2BW"
    title = "2bw, two weight versions, {microbatches} microbatches per minibatch"
    summary = "asynchronous (PipeDream-2BW), two weight versions, gradients one update stale"
    formula = "double-buffered"
    asynchronous = True
    placed = False
    deepens = True
    weight_versions = 2
    torch_differs = True

    def versions_suffice(self, microbatches: int, replicas: int, in_flight: int) -> bool:
        # Every minibatch finds the one before the last done.
        return replicas <= microbatches and in_flight - 1 <= microbatches // replicas

    def deepest(self, replicas: int, microbatches: int) -> int | None:
        return microbatches // replicas + 1

    def turn(self, shape: PipelineShape, unit: Unit) -> int:
        return unit.minibatch * shape.microbatches + unit.microbatch

    def stream(
        self, shape: PipelineShape, stage: int, rank: int, minibatches: int
    ) -> Iterator[Instruction]:
        """See base class."""
        replicas = shape.ranks[stage]
        assert len(replicas) <= shape.microbatches
        first = shape.replica_of(stage, rank)
        mine = range(first, shape.microbatches * minibatches, len(replicas))
        for is_forward, index in one_forward_one_backward(len(mine), shape.in_flight(stage)):
            unit = Unit(*divmod(mine[index], shape.microbatches))
            if is_forward:
                yield from forward(shape, stage, unit, max(0, unit.minibatch - 1))
                continue

            last = unit.microbatch + len(replicas) >= shape.microbatches
            yield from backward(shape, stage, unit, last_of_round=last)
            if last:
                # What is left of the next minibatch runs at the version that this update replaces.
                ahead = index + shape.in_flight(stage)
                more = ahead < len(mine) and mine[ahead] // shape.microbatches == unit.minibatch + 1
                kept = (unit.minibatch,) if more else ()
                yield from finish_minibatch(shape, [stage], rank, unit.minibatch, kept)


TWO_BW = DoubleBuffered()


class OneForwardOneBackward(Schedule):
    """PipeDream's schedule (Narayanan et al., SOSP 2019, section 3.2): the pipeline never
    drains.
    """

    name = "1f1b"
    known_as = "PipeDream 1F1B"
    title = "1f1b with weight stashing"
    summary = (
        "asynchronous (PipeDream, alias pipedream), never drains, stashes weights, has stale "
        "gradients"
    )
    formula = "asynchronous"
    asynchronous = True
    divides = False
    stashes = True
    deepens = True
    torch_differs = True

    def deepest(self, replicas: int, microbatches: int) -> int | None:
        return None  # minibatches follow one another without end

    def stream(
        self, shape: PipelineShape, stage: int, rank: int, minibatches: int
    ) -> Iterator[Instruction]:
        """See base class."""
        replicas = shape.ranks[stage]
        per_round = shape.minibatches_per_update(stage)
        mine = range(shape.replica_of(stage, rank), minibatches, len(replicas))
        for is_forward, index in one_forward_one_backward(len(mine), shape.in_flight(stage)):
            if is_forward:
                yield from forward(shape, stage, Unit(mine[index]))
                continue

            round_ = mine[index] // per_round
            last_of_round = index + 1 == len(mine) or mine[index + 1] // per_round > round_
            yield from backward(shape, stage, Unit(mine[index]), last_of_round=last_of_round)
            if last_of_round:
                yield from _finish_round(shape, stage, rank, round_, minibatches)

        # A last, partial round has no minibatch for this replica, but its weights must follow the
        # others'.
        last_round = (minibatches - 1) // per_round
        if minibatches and (not mine or mine[-1] // per_round < last_round):
            yield from _finish_round(shape, stage, rank, last_round, minibatches)

        # What other stages still add to shared weights.
        rounds = -(-minibatches // per_round)
        behind = shape.lag(stage)
        for number, round_ in enumerate(range(max(0, rounds - behind), rounds)):
            yield from add_shared(shape, stage, rank, round_)
            yield Update(stage, rounds + number)


def _finish_round(
    shape: PipelineShape, stage: int, rank: int, round_: int, minibatches: int
) -> Iterator[Instruction]:
    per_round = shape.minibatches_per_update(stage)
    if per_round > 1 or shape.sums_in_replicas:
        yield AllReduce(stage, round_, divisor=min(per_round, minibatches - round_ * per_round))
    yield from send_shared(shape, stage, rank, round_)
    if round_ >= shape.lag(stage):
        yield from add_shared(shape, stage, rank, round_ - shape.lag(stage))
    yield Update(stage, round_)


ONE_F_ONE_B = OneForwardOneBackward()


class GPipe(Flush):
    """All forwards of a minibatch, then all its backwards (Huang et al., GPipe, NeurIPS 2019,
    section 2.3).
    """

    name = "gpipe"
    known_as = "GPipe"
    title = "gpipe, {microbatches} microbatches per minibatch"
    summary = "synchronous, all forwards of a minibatch before its backwards"
    deepens = False
    alternates = False
    torch_name = "ScheduleGPipe"

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        return -(-microbatches // replicas)


GPIPE = GPipe()


class ZeroBubble(Flush):
    """1f1b-flush with backwards in two parts (Qi et al., Zero Bubble Pipeline Parallelism, ICLR
    2024, section 2).

    Gradients of weights come some backwards after those of activations, which other stages wait
    for. A unit is in flight until its second part is done: the later a stage, the longer that
    waits, so that all stages hold what the first one does. Where the pipeline neither fills nor
    drains, a backward in one part computes less.
    """

    name = "zb-h1"
    known_as = "zero bubble, ZB-H1"
    title = "zb-h1, backwards in two parts, {microbatches} microbatches per minibatch"
    summary = "synchronous, as 1f1b-flush, with weight gradients that fill the bubble"
    splits_backward = True
    deepens = False
    solved_as = FLUSH
    torch_differs = True

    def depths_of(self, shape: PipelineShape) -> tuple[int, ...]:
        """See base class."""
        depths = warm_up_depths(shape.replicas)
        wanted = (
            max(depths[0], depth) if shape.splits(stage) else depth
            for stage, depth in enumerate(depths)
        )
        return tuple(
            min(-(-shape.microbatches // r), depth)
            for r, depth in zip(shape.replicas, wanted, strict=True)
        )

    def minibatch(
        self, shape: PipelineShape, stage: int, rank: int, minibatch: int
    ) -> Iterator[Instruction]:
        """See base class."""
        if not shape.splits(stage):
            yield from super().minibatch(shape, stage, rank, minibatch)
            return

        mine = shape.units_of(stage, rank, minibatch)
        ahead = min(shape.in_flight(stage), warm_up_depths(shape.replicas)[stage])
        behind = shape.in_flight(stage) - ahead
        draining = max(1, shape.in_flight(stage) - 1)
        waiting: deque[Unit] = deque()
        for is_forward, index in one_forward_one_backward(len(mine), ahead):
            unit = mine[index]
            if is_forward:
                yield from forward(shape, stage, unit)
            elif behind <= index < len(mine) - draining:
                yield from backward(shape, stage, unit, last_of_round=False)
            else:
                yield from backward(shape, stage, unit, last_of_round=False, split=True)
                waiting.append(unit)
                if len(waiting) > behind:
                    last = index == len(mine) - 1 and len(waiting) == 1
                    yield BackwardWeight(stage, waiting.popleft(), last_of_round=last)

        while waiting:
            yield BackwardWeight(stage, waiting.popleft(), last_of_round=not waiting)
        yield from finish_minibatch(shape, [stage], rank, minibatch)


ZB_H1 = ZeroBubble()
