"""Which ways to run stages fit the memory, and the quickest of them.

What a stage holds does not depend on the time to meet, so the quickest ways that fit are found
once, for all walks of all searches over a space.
"""

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import Floats, Integers
from planner.schedule.schedule import warm_up_depth
from planner.solver.problem.replica_models import ReplicaModel
from planner.solver.search.chain.variants import StageVariants, Variants

_BITS = 20  # of a key for the units in flight, and for the replicas


class FittingVariants:
    """The ways of a space that fit under one cost model."""

    def __init__(self, variants: StageVariants, model: ReplicaModel) -> None:
        self.variants = variants
        self.model = model
        depends_on = (
            type(model),
            model.microbatches,
            variants.limits.memory_bytes,
            variants.rule,
            variants.whole_stages,
            variants.shards,
        )
        self._known = variants.space.memo.table((FittingVariants, depends_on), dict[int, _Quickest])

    def allowed(
        self,
        sharded: NDArray[np.bool_],
        replicas: Integers,
        after: Integers,
    ) -> tuple[NDArray[np.bool_], Integers]:
        """Return which stages may have so many replicas, whatever they hold, and their units in
        flight.
        """
        in_flight = np.asarray(warm_up_depth(replicas, after))
        busy = np.minimum(replicas, self.model.most_replicas)

        allowed = self.variants.allowed(sharded, replicas)
        allowed &= in_flight <= self.variants.limits.deepest
        allowed &= self.model.may_have(replicas)
        allowed &= self.model.enough_before(busy, after)
        return allowed, in_flight

    def quickest(
        self,
        state: int,
        ends: Integers,
        choosing: NDArray[np.bool_],
        sharded: bool,
        replicas: Integers,
        in_flight: Integers,
    ) -> tuple[Integers, Floats]:
        """Return the choice of each stage that is quickest, and its seconds of recomputing; -1
        where none fits.
        """
        # 1. Of stages that are not sharded only one replica or several counts.
        if not sharded:
            told_apart = 1
            if self.variants.layer_costs.counts_replicas:
                told_apart = 2
            replicas = np.minimum(replicas, told_apart)

        # 2. Look up what is known, by last state, whether sharded, replicas, and units in flight.
        keys = (((((ends << 1) + sharded) << _BITS) + replicas) << _BITS) + in_flight
        known = self._known.setdefault(state, _Quickest())
        places, found = known.find(keys)

        # 3. Find the rest, each stage once.
        if not found.all():
            missing = np.flatnonzero(~found)
            new_keys, first = np.unique(keys[missing], return_index=True)
            rows = missing[first]
            variants = self.variants.all(state, ends[rows], choosing[rows])
            fits = variants.fit(
                replicas[rows][variants.stage],
                in_flight[rows][variants.stage],
                self.model.schedule,
                self.model.microbatches,
            )

            known.add(new_keys, *_first_of_each(variants, fits & (variants.sharded == sharded)))
            places, _ = known.find(keys)

        return known.choice[places], known.recompute_s[places]


class _Quickest:
    """The quickest choices that fit, of stages that begin at one state, by ascending keys."""

    def __init__(self) -> None:
        self.keys: Integers = np.zeros(0, dtype=np.int64)
        # of recomputing layers; -1 where none fits
        self.choice: Integers = np.zeros(0, dtype=np.int64)
        self.recompute_s: Floats = np.zeros(0)

    def find(self, keys: Integers) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the places of keys, and which of them are known."""
        places = np.searchsorted(self.keys, keys)
        return places, np.append(self.keys, -1)[places] == keys

    def add(self, keys: Integers, choice: Integers, recompute_s: Floats) -> None:
        """Insert stages that are not known yet."""
        keys = np.concatenate((self.keys, keys))
        order = np.argsort(keys, kind="stable")
        self.keys = keys[order]
        self.choice = np.concatenate((self.choice, choice))[order]
        self.recompute_s = np.concatenate((self.recompute_s, recompute_s))[order]


def _first_of_each(variants: Variants, usable: NDArray[np.bool_]) -> tuple[Integers, Floats]:
    """Return each stage's first usable choice, and its seconds of recomputing; -1 for a stage
    without one.
    """
    # The choices of a stage stand together, the quickest first.
    begin = np.flatnonzero(np.diff(variants.stage, prepend=-1))
    place = np.where(usable, np.arange(len(variants)), len(variants))
    first = np.minimum.reduceat(place, begin)

    recompute_s = np.broadcast_to(variants.work.recompute_s, len(variants))
    return np.append(variants.choice, -1)[first], np.append(recompute_s, 0.0)[first]
