"""Exchange gradients of weights that several stages share, and say when their sums are applied.

Each stage that holds a shared weight has a copy of its own. Once per round it sends its gradient to the others. Every
stage sums all gradients in the order of the stages, so that all copies take the same steps to the bit.

Synchronous schedules and 2bw sum the gradients of a round before its update. Under 1f1b a stage does not wait for that.
The stage with most minibatches in flight (mostly the first) finishes round t last; by then another stage is ahead by as
many rounds as it has fewer in flight, its lag. That stage applies the sum of round t with the update of its round
t + lag. So every minibatch sees a shared weight at one version in all stages, that of the largest depth d:
w(t+1) = w(t) - lr * grad f(w(t-d+1)). Sums that are left at the end of a run get updates of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.schedule.instructions import AddShared, Instruction, ReceiveShared, SendShared, Unit

Ranks = Sequence[Sequence[int]]


def sharers(pairs: Sequence[tuple[int, int]], stage: int) -> tuple[int, ...]:
    """Return the stages that share weights with `stage`, in order."""
    return tuple(sorted({other for pair in pairs if stage in pair for other in pair if other != stage}))


def lag(pairs: Sequence[tuple[int, int]], depths: Sequence[int], accumulate: int, stage: int) -> int:
    """Return by how many rounds `stage` is ahead of the slowest of its sharers, their sharers included."""
    family, size = {stage}, 0
    while len(family) > size:
        size = len(family)
        family.update(other for pair in pairs if family.intersection(pair) for other in pair)
    return -(-(max(depths[other] for other in family) - depths[stage]) // accumulate)


def send_shared(ranks: Ranks, peers: Sequence[int], stage: int, rank: int, round_: int) -> Iterator[Instruction]:
    """Yield the sends of `rank`: each replica of a peer receives from one replica of the stage."""
    # After the all-reduce all replicas have the same gradients, so any of them can send.
    own = ranks[stage]
    for peer in peers:
        for number, peer_rank in enumerate(ranks[peer]):
            if own[number % len(own)] == rank:
                yield SendShared(stage, Unit(round_), peer, peer_rank)


def add_shared(ranks: Ranks, peers: Sequence[int], stage: int, rank: int, round_: int) -> Iterator[Instruction]:
    """Yield the receives of the peers' gradients, and their sum."""
    number = ranks[stage].index(rank)
    for peer in peers:
        yield ReceiveShared(stage, Unit(round_), peer, ranks[peer][number % len(ranks[peer])])
    if peers:
        yield AddShared(stage, round_)
