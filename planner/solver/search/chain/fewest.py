"""The fewest replicas with which stages meet a time and fit the memory, in the best way to run them.

A stage in its plainest way (nothing sharded; nothing recomputed, or all under that rule) has a closed form. It sharded,
or recomputing some of its layers, may do with fewer replicas, where memory is limited or the optimizer takes long.
Those counts are tried from a lower bound on, by the cost model itself. What a stage holds does not depend on the time
to meet, so the quickest ways that fit are found once for all walks of all searches over a space.
"""

from collections.abc import Hashable
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions
from planner.cost.work import IMPOSSIBLE, Floats, Integers, fewest_to_hold
from planner.options.solving import UNLIMITED
from planner.schedule.schedule import warm_up_depth
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.problem import Limits
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import WaysOf, taken
from planner.units import SLACK

_BITS = 20  # of a key for the units in flight, and for the replicas


# What is known of the stages that begin at a state: keys of last state, whether sharded, replicas and units in flight,
# ascending; the quickest choice of recomputing layers that fits, or -1 where none does; and its seconds of recomputing.
_Found = tuple[Integers, Integers, Floats]
_NOTHING: _Found = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
# By what the memory of stages depends on, and first state.
_KNOWN: WeakKeyDictionary[Chain, dict[Hashable, dict[int, _Found]]] = WeakKeyDictionary()


FEW_STATES = 300  # up to which stages may choose which of their layers recompute
# Replica counts that are tried one by one where more may be slower. Beyond, they are taken to be faster, as they are
# without latency.
_ONE_BY_ONE = 64


class FewestReplicas:
    """Replicas of the stages of one space under one cost model."""

    def __init__(self, space: Chain, model: Bounds, limits: Limits) -> None:
        self.space, self.model, self.limits = space, model, limits
        self.ways = WaysOf(space, limits)
        key = type(model), model.microbatches, limits.memory_bytes, self.ways.rule, self.ways.whole_stages
        self._known = _KNOWN.setdefault(space, {}).setdefault((*key, self.ways.shards), {})
        # GPU seconds of the layers before each last state, at least.
        self.before_s = model.least_s(self.ways.least(space.work(0, np.arange(len(space)))))

    def least(self, state: int, others: Integers, target_s: float) -> Integers:
        """Return replicas that the stages need at least, by their computation alone."""
        least_s = self.before_s[others] - self.before_s[state]
        return np.asarray(np.maximum(np.ceil(least_s / target_s - SLACK), 1), dtype=np.int64)

    def alone(self, state: int, others: Integers, target_s: float) -> Integers:
        """Return the fewest replicas that meet the target whatever the memory, or fewer."""
        if self.ways.shards:
            return self.least(state, others, target_s)
        return self.model.fewest_replicas(self.space.work(state, others), target_s)

    def fewest(
        self, state: int, others: Integers, target_s: float, after: Integers, most: Integers
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the fewest replicas that meet the target and fit the memory, and whether they must recompute.

        Where a stage needs more than `most`, the answer is any larger number.
        """
        r, tight = self._closed_form(state, others, target_s, after)
        tight &= self.ways.chooses
        again = np.full(len(others), self.ways.recomputes)
        if self.ways.always_shards:
            r = np.where(r > 1, IMPOSSIBLE, r)
        if not self.ways.shards and not tight.any():
            return r, again
        # What recomputes takes longer than what does not, so no fewer replicas do.
        low = self.alone(state, others, target_s)
        low = np.where(tight, low, np.maximum(low, 2))  # without limits of memory, only sharding may help
        some = np.flatnonzero((tight | self.ways.shards) & (low < r) & (low <= most))
        if len(some):
            trial = _Trial(self, state, others[some], tight[some], after[some])
            fewer, recomputes = trial.fewest(low[some], np.minimum(r - 1, most)[some], target_s)
            better = fewer < r[some]
            r[some] = np.where(better, fewer, r[some])
            again[some] = np.where(better, recomputes, again[some])
        return r, again

    def quickest(
        self, state: int, other: int, replicas: Integers, after: int, target_s: float = np.inf
    ) -> tuple[StageOptions, float] | None:
        """Return the best way to run a stage on any of these numbers of replicas, and its seconds; None if none fits.

        Ways that meet the target come first, then ways that recompute no more than they must, then the quickest.
        """
        stages = np.full(len(replicas), other)
        ways = self.ways.all(state, stages, np.full(len(replicas), self.ways.chooses))
        r = replicas[ways.stage]
        allowed, flying = self.allowed(ways.sharded, r, np.full(len(r), after))
        if self.limits.memory_bytes is not None:
            allowed &= self.model.held_bytes(ways.footprint_on(r), flying) <= self.limits.memory_bytes
        fits = np.flatnonzero(allowed)
        if not len(fits):
            return None
        all_s = np.broadcast_to(self.model.stage_s(ways.work, r), r.shape)
        seconds = all_s[fits]
        again = ways.again[fits] & self.ways.chooses & np.isfinite(target_s)
        row = int(fits[np.lexsort((ways.sharded[fits], seconds, again, seconds > target_s))[0]])
        return ways.options(row, int(r[row])), float(all_s[row])

    def quickest_that_fit(
        self,
        state: int,
        others: Integers,
        choosing: NDArray[np.bool_],
        replicas: Integers,
        sharded: NDArray[np.bool_],
        flying: Integers,
    ) -> tuple[Integers, Floats]:
        """Return the choice of each stage that is quickest, and its seconds of recomputing; -1 where none fits.

        Of stages that are not sharded only one replica or several counts.
        """
        told_apart = 2 if self.space.layer_costs.counts_replicas else 1
        replicas = np.where(sharded, replicas, np.minimum(replicas, told_apart))
        wanted = (((((others << 1) + sharded) << _BITS) + replicas) << _BITS) + flying
        found = self._known.get(state, _NOTHING)
        at = np.searchsorted(found[0], wanted)
        missing = np.append(found[0], -1)[at] != wanted
        if missing.any():
            unknown, first = np.unique(wanted[missing], return_index=True)
            rows = np.flatnonzero(missing)[first]
            ways = self.ways.all(state, others[rows], choosing[rows])
            stage, r = ways.stage, replicas[rows][ways.stage]
            held = self.model.held_bytes(ways.footprint_on(r), flying[rows][stage])
            fits = (held <= (self.limits.memory_bytes or 0)) & (ways.sharded == sharded[rows][stage])
            # The choices of a stage stand together, the quickest first.
            place = np.where(fits, np.arange(len(ways)), len(ways))
            quickest = np.minimum.reduceat(place, np.flatnonzero(np.diff(stage, prepend=-1)))
            recompute_s = np.append(np.broadcast_to(ways.work.recompute_s, len(ways)), 0.0)
            more = unknown, np.append(ways.choice, -1)[quickest], recompute_s[quickest]
            keys, choice, seconds = map(np.concatenate, zip(found, more, strict=True))
            order = np.argsort(keys, kind="stable")
            found = self._known[state] = keys[order], choice[order], seconds[order]
            at = np.searchsorted(found[0], wanted)
        return found[1][at], found[2][at]

    def allowed(
        self, sharded: NDArray[np.bool_], replicas: Integers, after: Integers
    ) -> tuple[NDArray[np.bool_], Integers]:
        """Return which stages are allowed on so many replicas, whatever they hold, and their units in flight."""
        flying = np.asarray(warm_up_depth(replicas, after))
        allowed = self.ways.allowed(sharded, replicas) & (flying <= self.limits.deepest) & self.model.may_have(replicas)
        return allowed & self.model.enough_before(np.minimum(replicas, self.model.most_replicas), after), flying

    def _closed_form(
        self, state: int, others: Integers, target_s: float, after: Integers
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the fewest replicas in the plainest way, and where memory asks for more than one."""
        space, limits, one = self.space, self.limits, np.ones(1, dtype=np.int64)
        work, several = space.work(state, others), list[Integers]()
        if limits.memory_bytes is not None:
            footprint = self.ways.plainest_footprint(state, others, work)
            one, *several = [
                fewest_to_hold(
                    self.model.most_in_flight(space.layer_costs.replicated(footprint, r), limits.memory_bytes), after
                )
                for r in ((1, 2) if space.layer_costs.counts_replicas else (1,))
            ]
        work = self.ways.plainest_work(work)
        more = several[0] if several else one
        at_least = np.where(one > 1, np.maximum(more, 2), 1) if several else one
        if limits.deepest < UNLIMITED:
            at_least = np.maximum(at_least, fewest_to_hold(limits.deepest, after))
        r = self.model.fewest_replicas(work, target_s, at_least, after)
        if several and ((r > 1) & (r < more)).any():
            r = self.model.fewest_replicas(work, target_s, np.where(r > 1, np.maximum(at_least, more), at_least), after)
        return r, np.array(np.broadcast_to(more > 1, r.shape))


class _Trial:
    """Stages from one state, tried on given replicas, in the quickest ways that fit; `tight` ones may recompute."""

    def __init__(
        self, parent: FewestReplicas, state: int, others: Integers, tight: NDArray[np.bool_], after: Integers
    ) -> None:
        self._parent, self._state = parent, state
        self._others, self._tight, self._after = others, tight, after
        self._work = parent.ways.plainest_work(parent.space.work(state, others))

    def fewest(self, low: Integers, high: Integers, target_s: float) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the fewest replicas of each stage within bounds, and whether all ways with so many recompute."""
        found = np.full(len(low), IMPOSSIBLE, dtype=np.int64)
        again = np.zeros(len(low), dtype=bool)

        def settle(stage: Integers, r: Integers) -> NDArray[np.bool_]:
            meets, plain = self._meets(stage, r, target_s)
            rows = np.flatnonzero(meets)
            settled, first = np.unique(stage[rows], return_index=True)
            found[settled], again[settled] = r[rows[first]], ~plain[rows[first]]
            return meets

        tried = 2 if self._parent.model.more_is_faster else _ONE_BY_ONE
        counts = np.minimum(high - low + 1, tried)
        stage = np.repeat(np.arange(len(low)), counts)
        settle(stage, low[stage] + np.arange(len(stage)) - np.repeat(np.cumsum(counts) - counts, counts))
        open_ = np.flatnonzero((found >= IMPOSSIBLE) & (low + tried <= high))
        open_ = open_[settle(open_, high[open_])]
        below, enough = low + tried - 1, high.copy()
        while len(open_ := open_[enough[open_] - below[open_] > 1]):
            middle = (below[open_] + enough[open_]) // 2
            meets = settle(open_, middle)
            enough[open_[meets]], below[open_[~meets]] = middle[meets], middle[~meets]
        return found, again

    def _meets(self, stage: Integers, r: Integers, target_s: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return whether stages on so many replicas meet the target in any way, and whether in one without R."""
        parent, copies = self._parent, 2 if self._parent.ways.shards else 1
        # All of them follow again as sharded ones.
        sharded = np.repeat(np.arange(copies) > 0, len(r))
        stage, r = np.tile(stage, copies), np.tile(r, copies)
        work = taken(self._work, stage)
        work = work.shared_out(sharded) if copies > 1 else work
        meets, flying = parent.allowed(sharded, r, self._after[stage])
        meets &= parent.model.stage_s(work, r) <= target_s
        plain = np.full(len(r), not parent.ways.recomputes)
        # What recomputes takes longer than what does not, so most stages need no choice to be found.
        if parent.limits.memory_bytes is not None and len(rows := np.flatnonzero(meets)):
            ends, tight = self._others[stage[rows]], self._tight[stage[rows]]
            choice, recompute_s = parent.quickest_that_fit(
                self._state, ends, tight, r[rows], sharded[rows], flying[rows]
            )
            seconds = parent.model.stage_s(replace(taken(work, rows), recompute_s=recompute_s), r[rows])
            meets[rows] = (choice >= 0) & (seconds <= target_s)
            plain[rows] &= choice == 0
        any_, any_plain = (np.any(each.reshape(copies, -1), axis=0) for each in (meets, meets & plain))
        return np.asarray(any_), np.asarray(any_plain)
