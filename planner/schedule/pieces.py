"""What streams are made of: 1F1B order, a unit's forward and backward with its messages, a round's
end.
"""

from collections.abc import Iterator, Sequence

from planner.schedule import instructions as do
from planner.schedule.instructions import Instruction, Unit
from planner.schedule.schedule import PipelineShape


def one_forward_one_backward(units: int, in_flight: int) -> Iterator[tuple[bool, int]]:
    """Yield (is it a forward, index of the unit), in order: for 4 units and 2 in flight F0 F1 B0 F2
    B1 F3 B2 B3.
    """
    for step in range(units + in_flight):
        if 0 <= step - in_flight < units:
            yield False, step - in_flight
        if step < units:
            yield True, step


def forward(
    shape: PipelineShape, stage: int, unit: Unit, version: int | None = None
) -> Iterator[Instruction]:
    """Yield the forward of a unit, with the messages before and after it."""
    for channel in shape.arriving(stage):
        yield do.ReceiveActivation(stage, unit, channel.source, shape.rank_of(channel.source, unit))
    yield do.Forward(stage, unit, version)
    for channel in shape.leaving(stage):
        yield do.SendActivation(stage, unit, channel.target, shape.rank_of(channel.target, unit))


def backward(
    shape: PipelineShape, stage: int, unit: Unit, *, last_of_round: bool, split: bool = False
) -> Iterator[Instruction]:
    """Yield the backward of `unit`, or its first part, with the messages it needs and sends."""
    for channel in shape.leaving(stage):
        if channel.gradient:
            yield do.ReceiveGradient(
                stage, unit, channel.target, shape.rank_of(channel.target, unit)
            )

    yield do.BackwardInput(stage, unit) if split else do.Backward(stage, unit, last_of_round)
    for channel in shape.arriving(stage):
        if channel.gradient:
            yield do.SendGradient(stage, unit, channel.source, shape.rank_of(channel.source, unit))


def send_shared(shape: PipelineShape, stage: int, rank: int, round_: int) -> Iterator[Instruction]:
    """Yield what `rank` sends of shared weights' gradients: each replica of a peer receives from
    one of the stage.
    """
    # After the all-reduce all replicas have the same gradients, so any of them can send.
    own = shape.ranks[stage]
    for peer in shape.sharers(stage):
        for number, peer_rank in enumerate(shape.ranks[peer]):
            if own[number % len(own)] == rank:
                yield do.SendShared(stage, Unit(round_), peer, peer_rank)


def add_shared(shape: PipelineShape, stage: int, rank: int, round_: int) -> Iterator[Instruction]:
    """Yield what adds up the gradients of weights that stages share, in a round."""
    number = shape.replica_of(stage, rank)
    peers = shape.sharers(stage)
    for peer in peers:
        yield do.ReceiveShared(
            stage, Unit(round_), peer, shape.ranks[peer][number % len(shape.ranks[peer])]
        )
    if peers:
        yield do.AddShared(stage, round_)


def finish_minibatch(
    shape: PipelineShape,
    stages: Sequence[int],
    rank: int,
    minibatch: int,
    kept: tuple[int, ...] = (),
) -> Iterator[Instruction]:
    """Yield the all-reduces and updates after a minibatch; its losses are scaled, so nothing is
    left to divide by.
    """
    for stage in stages:
        if shape.sums_gradients(stage):
            yield do.AllReduce(stage, minibatch, divisor=1)
        yield from send_shared(shape, stage, rank, minibatch)

    # All stages send before one of them waits for the others: two stages of a worker cannot block
    # each other.
    for stage in stages:
        yield from add_shared(shape, stage, rank, minibatch)
        yield do.Update(stage, minibatch, kept)
