"""1f1b: one forward, one backward, with weight stashing, and an update after every backward."""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedule.instructions import AllReduce, Instruction, Unit, Update
from planner.schedule.pieces import backward, forward, one_forward_one_backward
from planner.schedule.schedule import Count, PipelineShape, Schedule, warm_up_depth
from planner.schedule.versions import add_shared, send_shared


class OneForwardOneBackward(Schedule):
    """PipeDream's schedule: the pipeline never drains, each unit's backward uses the weights of its forward."""

    name = "1f1b"
    title = "1f1b with weight stashing"
    summary = "asynchronous, with weight stashing"
    updates = "after every backward; with replicas, after every round of one minibatch each"
    holds = "d, as above"
    source = "Narayanan et al., PipeDream, SOSP 2019, section 3.2"
    formula = "asynchronous"
    asynchronous = True
    divides = False
    stashes = True
    deepens = True

    @property
    def drained(self) -> Schedule:
        from planner.schedule.flush import FLUSH

        return FLUSH

    @property
    def leaner(self) -> tuple[Schedule, ...]:
        from planner.schedule.double_buffered import TWO_BW
        from planner.schedule.flush import FLUSH

        return TWO_BW, FLUSH

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        """Return the warm-up depth."""
        return warm_up_depth(replicas, gpus_after)

    def deepest(self, replicas: int, microbatches: int) -> int | None:
        """Return None: minibatches follow one another without end."""
        return None

    def stream(self, shape: PipelineShape, stage: int, rank: int, minibatches: int) -> Iterator[Instruction]:
        replicas = shape.ranks[stage]
        per_round = shape.minibatches_per_update(stage)
        mine = range(replicas.index(rank), minibatches, len(replicas))
        for is_forward, index in one_forward_one_backward(len(mine), shape.in_flight(stage)):
            if is_forward:
                version = None if shape.entry is None else shape.entry.version(mine[index], len(replicas))
                yield from forward(shape, stage, Unit(mine[index]), version)
                continue
            round_ = mine[index] // per_round
            last_of_round = index + 1 == len(mine) or mine[index + 1] // per_round > round_
            yield from backward(shape, stage, Unit(mine[index]), last_of_round=last_of_round)
            if last_of_round:
                kept: tuple[int, ...] = ()
                if shape.entry is not None:
                    kept = shape.entry.to_come(mine[index + shape.in_flight(stage) :], len(replicas), round_ + 1)
                yield from _finish_round(shape, stage, rank, round_, minibatches, kept)
        # A last, partial round has no minibatch for this replica, but its weights must follow the others'.
        last_round = (minibatches - 1) // per_round
        if minibatches and (not mine or mine[-1] // per_round < last_round):
            yield from _finish_round(shape, stage, rank, last_round, minibatches)
        rounds, behind = -(-minibatches // per_round), shape.lag(stage)
        for number, round_ in enumerate(range(max(0, rounds - behind), rounds)):
            yield from add_shared(shape.ranks, shape.sharers(stage), stage, rank, round_)
            yield Update(stage, rounds + number)


def _finish_round(
    shape: PipelineShape, stage: int, rank: int, round_: int, minibatches: int, kept: tuple[int, ...] = ()
) -> Iterator[Instruction]:
    per_round = shape.minibatches_per_update(stage)
    if per_round > 1:
        yield AllReduce(stage, round_, divisor=min(per_round, minibatches - round_ * per_round))
    if peers := shape.sharers(stage):
        yield from send_shared(shape.ranks, peers, stage, rank, round_)
        if round_ >= shape.lag(stage):
            yield from add_shared(shape.ranks, peers, stage, rank, round_ - shape.lag(stage))
    yield Update(stage, round_, kept)


ONE_F_ONE_B = OneForwardOneBackward()
