"""Weights that several stages share.

Once per round, each stage that holds a copy sends its gradient to the others, and sums all
gradients in the order of the stages, so that all copies take the same steps to the bit. Under 1f1b
a stage does not wait for that. The stage with most minibatches in flight finishes round t last; by
then another stage is ahead by as many rounds as it has fewer in flight, its lag. That stage applies
the sum of round t with the update of its round t + lag. So every minibatch sees a shared weight at
one version in all stages: w(t+1) = w(t) - lr * grad f(w(t-d+1)), d the largest depth. Sums that are
left at the end of a run get updates of their own.
"""

from collections.abc import Sequence


def sharers(pairs: Sequence[tuple[int, int]], stage: int) -> tuple[int, ...]:
    """Return the stages that share weights with this one."""
    return tuple(
        sorted({other for pair in pairs if stage in pair for other in pair if other != stage})
    )


def lag(pairs: Sequence[tuple[int, int]], depths: Sequence[int], stage: int) -> int:
    """Return by how many rounds `stage` is ahead of the slowest of its sharers, their sharers
    included.
    """
    family = {stage}
    size = 0
    while len(family) > size:
        size = len(family)
        family.update(other for pair in pairs if family.intersection(pair) for other in pair)
    return max(depths[other] for other in family) - depths[stage]
