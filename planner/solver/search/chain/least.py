"""The quickest ways to run stages that fit the memory, remembered for all walks of all searches over a space.

A stage's memory depends on its layers, its units in flight and, where it is sharded, its replicas. It does not depend
on the time to meet. So the least extra seconds are found once for each of these, and a walk looks them up.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import Floats, Integers
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.states import StateSpace
from planner.solver.search.chain.ways import WaysOf

_BITS = 20  # of a key for the units in flight, and for the replicas


@dataclass(frozen=True)
class Stages:
    """Stages that begin at one state.

    Attributes:
        state: at which they begin.
        others: at which they end.
        choosing: which may choose what to recompute; the others fit the memory where nothing is sharded, or have no
            choice.
    """

    state: int
    others: Integers
    choosing: NDArray[np.bool_]

    def __getitem__(self, rows: Integers) -> Stages:
        return Stages(self.state, self.others[rows], self.choosing[rows])


@dataclass(frozen=True)
class _Found:
    """What is known of the stages that begin at one state.

    Attributes:
        keys: of last state, whether sharded, replicas and units in flight; ascending.
        choice: of recomputing layers, the quickest that fits; -1 where none does.
        recompute_s: of the choice.
    """

    keys: Integers
    choice: Integers
    recompute_s: Floats

    def merged(self, other: _Found) -> _Found:
        """Return this and what is known beside it."""
        keys = np.concatenate((self.keys, other.keys))
        order = np.argsort(keys, kind="stable")
        choice = np.concatenate((self.choice, other.choice))
        return _Found(keys[order], choice[order], np.concatenate((self.recompute_s, other.recompute_s))[order])


_NOTHING = _Found(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
# By what the memory of stages depends on, and first state.
_KNOWN: WeakKeyDictionary[StateSpace, dict[Hashable, dict[int, _Found]]] = WeakKeyDictionary()


class QuickestThatFit:
    """Finds the quickest ways whose memory fits.

    Args:
        space: of the stages.
        ways: to run them.
        model: that says what they hold.
        memory_bytes: that they may hold.
    """

    def __init__(self, space: StateSpace, ways: WaysOf, model: Bounds, memory_bytes: int) -> None:
        self._ways, self._model, self._memory_bytes = ways, model, memory_bytes
        key = type(model), model.microbatches, memory_bytes, ways.rule, ways.whole_stages, ways.shards
        self._told_apart = 2 if space.layer_costs.counts_replicas else 1  # replicas of stages that are not sharded
        self._known = _KNOWN.setdefault(space, {}).setdefault(key, {})

    def find(
        self, stages: Stages, replicas: Integers, sharded: NDArray[np.bool_], flying: Integers
    ) -> tuple[Integers, Floats]:
        """Return the choice of each stage that is quickest, and its seconds of recomputing; -1 where none fits.

        Args:
            stages: any number of them.
            replicas: of each.
            sharded: which divide the optimizer's state over their replicas; of others only one or several counts.
            flying: units in flight.
        """
        replicas = np.where(sharded, replicas, np.minimum(replicas, self._told_apart))
        keys = (((((stages.others << 1) + sharded) << _BITS) + replicas) << _BITS) + flying
        found = self._known.get(stages.state, _NOTHING)
        at = np.searchsorted(found.keys, keys)
        missing = np.append(found.keys, -1)[at] != keys
        if missing.any():
            unknown, first = np.unique(keys[missing], return_index=True)
            rows = np.flatnonzero(missing)[first]
            found = found.merged(
                _Found(unknown, *self._computed(stages[rows], replicas[rows], sharded[rows], flying[rows]))
            )
            self._known[stages.state] = found
            at = np.searchsorted(found.keys, keys)
        return found.choice[at], found.recompute_s[at]

    def _computed(
        self, stages: Stages, replicas: Integers, sharded: NDArray[np.bool_], flying: Integers
    ) -> tuple[Integers, Floats]:
        ways = self._ways.all(stages.state, stages.others, stages.choosing)
        stage = ways.stage
        held = self._model.held_bytes(ways.footprint_on(replicas[stage]), flying[stage])
        fits = (held <= self._memory_bytes) & (ways.sharded == sharded[stage])
        # The choices of a stage stand together, the quickest first.
        place = np.where(fits, np.arange(len(ways)), len(ways))
        first = np.minimum.reduceat(place, np.flatnonzero(np.diff(stage, prepend=-1)))
        choice = np.append(ways.choice, -1)[first]
        return choice, np.append(np.broadcast_to(ways.work.recompute_s, len(ways)), 0.0)[first]
