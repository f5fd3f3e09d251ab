"""The pieces that streams are made of: 1F1B order, a unit's forward and backward with its messages, a round's end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.schedule.instructions import (
    AddShared,
    AllReduce,
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    ReceiveShared,
    SendActivation,
    SendGradient,
    SendShared,
    Unit,
    Update,
)
from planner.schedule.schedule import PipelineShape


def one_forward_one_backward(units: int, in_flight: int) -> Iterator[tuple[bool, int]]:
    """Yield the order of computations: `in_flight` forwards, then backward and forward in turn, then the rest.

    Yields (is it a forward, index of the unit): for 4 units and 2 in flight F0 F1 B0 F2 B1 F3 B2 B3.
    """
    for step in range(units + in_flight):
        if 0 <= step - in_flight < units:
            yield False, step - in_flight
        if step < units:
            yield True, step


def forward(shape: PipelineShape, stage: int, unit: Unit, version: int | None = None) -> Iterator[Instruction]:
    """Yield the forward of `unit` with the messages it needs and sends."""
    for channel in shape.arriving(stage):
        yield ReceiveActivation(stage, unit, channel.source, shape.rank_of(channel.source, unit))
    yield Forward(stage, unit, version)
    for channel in shape.leaving(stage):
        yield SendActivation(stage, unit, channel.target, shape.rank_of(channel.target, unit))


def backward(
    shape: PipelineShape, stage: int, unit: Unit, *, last_of_round: bool, split: bool = False
) -> Iterator[Instruction]:
    """Yield the backward of `unit`, or its first part, with the messages it needs and sends."""
    for channel in shape.leaving(stage):
        if channel.gradient:
            yield ReceiveGradient(stage, unit, channel.target, shape.rank_of(channel.target, unit))
    yield BackwardInput(stage, unit) if split else Backward(stage, unit, last_of_round)
    for channel in shape.arriving(stage):
        if channel.gradient:
            yield SendGradient(stage, unit, channel.source, shape.rank_of(channel.source, unit))


def send_shared(shape: PipelineShape, stage: int, rank: int, round_: int) -> Iterator[Instruction]:
    """Yield what `rank` sends of shared weights' gradients: each replica of a peer receives from one of the stage."""
    # After the all-reduce all replicas have the same gradients, so any of them can send.
    own = shape.ranks[stage]
    for peer in shape.sharers(stage):
        for number, peer_rank in enumerate(shape.ranks[peer]):
            if own[number % len(own)] == rank:
                yield SendShared(stage, Unit(round_), peer, peer_rank)


def add_shared(shape: PipelineShape, stage: int, rank: int, round_: int) -> Iterator[Instruction]:
    """Yield the receives of the peers' gradients of shared weights, and their sum."""
    number, peers = shape.ranks[stage].index(rank), shape.sharers(stage)
    for peer in peers:
        yield ReceiveShared(stage, Unit(round_), peer, shape.ranks[peer][number % len(shape.ranks[peer])])
    if peers:
        yield AddShared(stage, round_)


def finish_minibatch(
    shape: PipelineShape, stages: Sequence[int], rank: int, minibatch: int, kept: tuple[int, ...] = ()
) -> Iterator[Instruction]:
    """Yield the all-reduces and updates after the last backward of a minibatch that is divided.

    The losses of its microbatches are scaled to sum to the minibatch's, so nothing is left to divide by.
    """
    for stage in stages:
        if len(shape.ranks[stage]) > 1:
            yield AllReduce(stage, minibatch, divisor=1)
        yield from send_shared(shape, stage, rank, minibatch)
    # All stages send before one of them waits for the others: two stages of a worker cannot block each other.
    for stage in stages:
        yield from add_shared(shape, stage, rank, minibatch)
        yield Update(stage, minibatch, kept)
