"""The walk of `Search` with the number of each stage: for limits on how many there are, and layers pinned to stages.

With s(J) the least GPUs after J, whatever the number of its stage, as a bound,

    gpus(I, k) = min over J of  gpus(J, k + 1) + fewest_replicas(I, J, T)        for stages number k from I to J

O(numbers · states²) per target, and only asked where the walk without numbers has a plan that breaks a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import IMPOSSIBLE, Integers
from planner.solver.chain.states import StateSpace
from planner.solver.numbering import Numbering

# GPUs of the suffixes that begin with the stages from a state to others, given the GPUs after these; their replicas,
# and whether they recompute.
Suffixes = Callable[[int, Integers, Integers], tuple[Integers, Integers, NDArray[np.bool_]]]


@dataclass(frozen=True)
class Unnumbered:
    """What is known of the same walk without numbers.

    Attributes:
        after: GPUs after each state, at least.
        room: GPUs from each state on, at most.
        gpus: that there are.
    """

    after: Integers
    room: Integers
    gpus: int


def numbered_walk(
    space: StateSpace, numbering: Numbering, known: Unnumbered, suffixes: Suffixes
) -> tuple[list[int], list[int]] | None:
    """Return states and replicas of the plan with the fewest GPUs whose stages have numbers that they may have."""
    last, most = len(space) - 1, numbering.most(space, known.gpus)
    gpus = np.full((most + 1, last + 1), IMPOSSIBLE, dtype=np.int64)  # by the stages before, and the state
    rest = np.zeros((2, most + 1, last + 1), dtype=np.int64)  # stages of the suffix, and those that recompute
    choice = np.zeros((2, most + 1, last + 1), dtype=np.int64)  # next state and replicas
    gpus[1:, last] = 0
    useful = np.flatnonzero(known.after <= known.gpus)
    for place in range(len(useful) - 2, -1, -1):
        state = int(useful[place])
        others = space.among_later(state, useful[place + 1 :])
        numbers = np.arange(1) if state == 0 else np.arange(1, most)
        if not len(others) or not len(numbers):
            continue
        may = numbering.numbers(space, state, others, most)[numbers]
        room = np.minimum(known.room[state], known.gpus - numbers)
        after = gpus[numbers + 1][:, others]
        rows, columns = np.nonzero(may & (after < room[:, None]))
        if not len(rows):
            continue
        ends = others[columns]
        total, replicas, again = suffixes(state, ends, after[rows, columns])
        stages, recomputing = rest[:, numbers[rows] + 1, ends] + np.stack((np.ones_like(ends), again))
        order = np.lexsort((recomputing, stages, total, rows))
        for pick in order[np.unique(rows[order], return_index=True)[1]]:  # the best of each number
            number = numbers[rows[pick]]
            if total[pick] <= room[rows[pick]]:
                gpus[number, state] = total[pick]
                rest[:, number, state] = stages[pick], recomputing[pick]
                choice[:, number, state] = ends[pick], replicas[pick]
    if gpus[0, 0] > known.gpus:
        return None
    states, chosen = [0], list[int]()
    while states[-1] < last:
        following, r = choice[:, len(chosen), states[-1]]
        states.append(int(following))
        chosen.append(int(r))
    return states, chosen
