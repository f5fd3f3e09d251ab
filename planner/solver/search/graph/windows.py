"""Bound the plans of a graph with any number of cuts, by telling cuts apart only by the work before them.

A window is a range of work before a cut. If a cut is in a window, some layers are surely before it, because all other
layers but their descendants have less work. Other layers are surely after it, because with their ancestors they have
more work. So weights, activations and values that cross the cut have bounds, and a stage between two windows has a
least cost. The fewest GPUs over sequences of windows are a walk over some hundred states. No plan meets a time that
they do not meet. Where the graph narrows to a single layer, the window is a point and nothing is lost: on a chain the
bound is the optimum.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.work import IMPOSSIBLE, Floats, Footprint, Work
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.budget import NO_HURRY, Deadline
from planner.solver.problem.problem import Limits
from planner.solver.problem.states import column
from planner.solver.search.chain.ways import taken
from planner.solver.search.graph.lattice import Groups, to_bits, words_of_masks
from planner.units import SLACK

_WINDOWS = 500
_TICKS = 2.0**50  # units of work in the whole model: sums of whole numbers are the same in any order
_EVERY = 2.0**-34  # share of the work that is added over all layers, so that no layer counts nothing
_PRECISION = 5e-4  # relative precision of the bound

Flags = NDArray[np.bool_]


class Windows:
    """Ranges of work before a cut, the layers surely before and after it, and the stages between such cuts."""

    def __init__(
        self, layer_costs: LayerCosts, model: Bounds, *, shards: bool = False, deadline: Deadline = NO_HURRY
    ) -> None:
        """Find the windows, and what stages between them cost.

        Raises:
            OutOfTimeError: if the deadline passes before they are known.
        """
        # Under 2bw the update counts once for all microbatches, sharded it may take next to nothing: it is left out.
        without = model.microbatches > 1 or shards
        times = ("forward_s", "backward_s") if without else ("forward_s", "backward_s", "update_s")
        self._shards, self._deadline = shards, deadline
        layers_s = np.sum([column(layer_costs, name) for name in times], axis=0)
        self.layer_costs, self.model, self.total_s = layer_costs, model, float(layers_s.sum())
        # Whole numbers: differences of sums must not depend on the order in which layers were added.
        ticks = np.rint(layers_s / self.total_s * _TICKS) + np.ceil(_TICKS * _EVERY / len(layers_s))
        before, after = _closures(layer_costs)
        self._up_to, self._from = before @ ticks, after @ ticks  # ticks with all ancestors, with all descendants
        self._everything = float(ticks.sum())
        low, high = self._edges(np.cumsum(ticks))
        for _ in range(2):  # layers that are surely before a cut make its window narrower, which makes more layers sure
            deadline.check()
            must, may = self._everything - self._from[:, None] < low, self._up_to[:, None] <= high
            low, high = np.maximum(low, ticks @ must), np.minimum(high, ticks @ may)
            inhabited = (low <= high) & (may | ~must).all(axis=0)
            low, high, must, may = low[inhabited], high[inhabited], must[:, inhabited], may[:, inhabited]
        self._low, self._high = low, high
        self._must: Flags = must  # by layer and window
        self._may: Flags = may
        # Take off the share that was added.
        self._least_s = np.maximum(self._low / _TICKS - 2 * _EVERY, 0.0) * self.total_s
        self._most_s = self._high / _TICKS * self.total_s
        self._work = self._between()
        self._footprint = self._held()

    def bound_s(self, limits: Limits, at_most_s: float) -> float:
        """Return seconds that no plan is below, up to `at_most_s`, as near as time allows."""
        low_s, high_s = self.total_s * self.model.microbatches / limits.gpus * (1 - SLACK), at_most_s
        if low_s >= high_s:
            return low_s
        if not self._possible(high_s * (1 - SLACK), limits):
            return high_s * (1 - SLACK)
        while high_s - low_s > _PRECISION * high_s and not self._deadline.passed:
            middle_s = (low_s + high_s) / 2
            if self._possible(middle_s, limits):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def _possible(self, target_s: float, limits: Limits) -> bool:
        """Return whether some sequence of windows meets the target with the GPUs."""
        gpus, memory_bytes, recompute = limits.gpus, limits.memory_bytes, limits.recompute
        count, times = len(self._low), self.model.microbatches
        after = np.ceil((self.total_s - self._most_s) * times / target_s - SLACK)
        before = np.ceil(self._least_s * times / target_s - SLACK)
        kept = np.flatnonzero(np.maximum(after, 1) + np.maximum(before, 1) <= gpus)
        kept = np.union1d(kept, [0, count - 1])
        pairs = np.ix_(kept, kept)
        work, footprint = taken(self._work, pairs), taken(self._footprint, pairs)
        if recompute in ("always", "blocks"):
            work = work.recomputed()
        if self._shards:
            footprint = footprint.shared_out(gpus)
        at_least = np.ones(work.compute_s.shape)
        if memory_bytes is not None:
            behind = np.maximum(after[kept], 0)[None, :]
            # What recomputes keeps all gradients at least.
            least = replace(footprint, saved_bytes=np.asarray(0.0), working_bytes=np.asarray(0.0))
            again = np.asarray(self.model.fewest_for_memory(least, behind, memory_bytes))
            plain = np.asarray(self.model.fewest_for_memory(footprint, behind, memory_bytes))
            at_least = plain if recompute == "never" else again if recompute != "auto" else np.minimum(plain, again)
        replicas = self.model.fewest_replicas(work, target_s, at_least).astype(np.int64)
        needed = np.full(len(kept), IMPOSSIBLE, dtype=np.int64)
        needed[-1] = 0
        for window in range(len(kept) - 2, -1, -1):
            needed[window] = (needed[window + 1 :] + replicas[window, window + 1 :]).min()
        return bool(needed[0] <= gpus)

    def _edges(self, sums: Floats) -> tuple[Floats, Floats]:
        """Return lower and upper ends of windows: cuts that every order passes are points, and the rest is divided."""
        surely, possibly = self._everything - self._from[:, None] < sums, self._up_to[:, None] <= sums
        points, width = [0.0], self._everything / _WINDOWS
        passed = sums[(surely == possibly).all(axis=0)]
        for point in passed.tolist():
            if len(passed) <= _WINDOWS or point >= points[-1] + width or point == self._everything:
                points.append(point)
        low, high = [0.0], [0.0]
        for start, end in pairwise(points):
            edges = np.rint(np.linspace(start, end - 1, max(1, round((end - start) / width)) + 1))
            low += [*(edges[:-1] + 1), end]
            high += [*edges[1:], end]
        return np.array(low), np.array(high)

    def _between(self) -> Work:
        """Return the least work of the stages from each window to each other; zero for impossible stages."""
        zero = np.asarray(0.0)
        outputs, received, sent = np.zeros(len(self._low)), *np.zeros((2, len(self._low), len(self._low)))
        for value in self.layer_costs.traffic:
            self._deadline.check()
            # In the windows whose cuts the value surely crosses.
            live = self._must[value.producer] & ~self._may[list(value.users)].all(axis=0)
            outputs += live * value.sent_bytes
            # Made before and used up within: received, and its gradient sent back.
            used = self._must[list(value.users)].all(axis=0)
            through = np.ix_(np.flatnonzero(live), np.flatnonzero(used))
            received[through] += value.sent_bytes
            sent[through] += value.returned_bytes
            # Made within and still needed: sent, and its gradient received.
            through = np.ix_(np.flatnonzero(~self._may[value.producer]), np.flatnonzero(live))
            received[through] += value.returned_bytes
            sent[through] += value.sent_bytes
        return Work(
            forward_s=zero,
            # All work counts as backward, because a longer backward hides more of an all-reduce.
            backward_s=np.maximum(self._least_s[None, :] - self._most_s[:, None], 0.0),
            update_s=zero,
            trainable_bytes=self._least("gradient_bytes"),
            received_bytes=received,
            sent_bytes=sent,
            received_messages=zero,
            sent_messages=zero,
            cut_before_bytes=np.repeat(outputs[:, None], len(outputs), axis=1),
            cut_after_bytes=np.repeat(outputs[None, :], len(outputs), axis=0),
            is_first=np.repeat((np.arange(len(outputs)) == 0)[:, None], len(outputs), axis=1),
        )

    def _held(self) -> Footprint:
        gradients, saved = self._least("gradient_bytes"), self._least("saved_bytes")
        return Footprint(
            **self.layer_costs.weights(self._least("weight_bytes")),
            gradient_bytes=gradients,
            optimizer_bytes=self._least("optimizer_bytes"),
            buffer_bytes=self._least("buffer_bytes"),
            saved_bytes=saved,
            message_bytes=np.asarray(0.0),
            # No peak is below all saved activations, or below all gradients.
            working_bytes=np.asarray(0.0) if self.layer_costs.at_work is None else -np.minimum(saved, gradients),
        )

    def _least(self, name: str) -> Floats:
        """Return the least sum over the layers of a stage from each window to each other."""
        amounts = column(self.layer_costs, name)
        surely = amounts @ self._must.astype(np.float64)
        possibly = amounts @ self._may.astype(np.float64)
        return np.maximum(surely[None, :] - possibly[:, None], 0.0)


def _closures(layer_costs: LayerCosts) -> tuple[Floats, Floats]:
    """Return, for each layer, its ancestors and its descendants as zeros and ones; itself is among both."""
    graph, count = Groups(layer_costs), len(layer_costs.profile.layers)
    before, after = ([sum(1 << layer for layer in group) for group in graph.layers] for _ in range(2))
    # Groups are in a topological order, so all that a group needs comes before it, and all that it feeds behind it.
    for group, needs in enumerate(graph.needs):
        for other in needs:
            before[group] |= before[other]
    for group in reversed(range(len(graph.feeds))):
        for other in graph.feeds[group]:
            after[group] |= after[other]

    def per_layer(masks: list[int]) -> Floats:
        words = words_of_masks([masks[graph.group_of[layer]] for layer in range(count)], count)
        return to_bits(words, count).astype(np.float64)

    return per_layer(before), per_layer(after)
