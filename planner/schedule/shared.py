"""Weights that several stages share: who tells whom the gradients, and when their sums are applied.

Each stage that holds a shared weight has a copy of its own. Once per round it sends its gradient to the others, every
copy adds all of them up in the order of the stages, and so all copies take the same steps.

A schedule that drains, and 2bw, adds the gradients of a round before the update of that round. Under 1f1b a stage does
not wait for that: the holder with most minibatches in flight, mostly the first, is done with round t when the others
have gone on by as many rounds as they have fewer in flight. They apply the sum of round t then, with the update of
their round t + lag. Every minibatch sees a shared weight at the same version in all stages, that of the holder with the
largest depth d: w(t+1) = w(t) - lr * grad f(w(t-d+1)). What is left at the end of a run gets updates of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.schedule.instructions import AddShared, Instruction, ReceiveShared, SendShared, Unit

Ranks = Sequence[Sequence[int]]


def sharers(pairs: Sequence[tuple[int, int]], stage: int) -> tuple[int, ...]:
    """The stages that share weights with `stage`, in order."""
    return tuple(sorted({other for pair in pairs if stage in pair for other in pair if other != stage}))


def lag(pairs: Sequence[tuple[int, int]], depths: Sequence[int], accumulate: int, stage: int) -> int:
    """Rounds by which `stage` is ahead of the slowest stage that it shares weights with, be it by way of others."""
    family, size = {stage}, 0
    while len(family) > size:
        size = len(family)
        family.update(other for pair in pairs if family.intersection(pair) for other in pair)
    return -(-(max(depths[other] for other in family) - depths[stage]) // accumulate)


def send_shared(ranks: Ranks, peers: Sequence[int], stage: int, rank: int, round_: int) -> Iterator[Instruction]:
    """Each replica of a peer gets the gradients, which all replicas of the stage have, from one of these."""
    own = ranks[stage]
    for peer in peers:
        for number, peer_rank in enumerate(ranks[peer]):
            if own[number % len(own)] == rank:
                yield SendShared(stage, Unit(round_), peer, peer_rank)


def add_shared(ranks: Ranks, peers: Sequence[int], stage: int, rank: int, round_: int) -> Iterator[Instruction]:
    """Take the peers' gradients and add them up."""
    number = ranks[stage].index(rank)
    for peer in peers:
        yield ReceiveShared(stage, Unit(round_), peer, ranks[peer][number % len(ranks[peer])])
    if peers:
        yield AddShared(stage, round_)
