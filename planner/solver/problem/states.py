"""States of the search: which layers are before a cut, and the stages between them.

The layers before a cut include all their predecessors: they are a *downset* of the graph. `Chain`
has the downsets that are the first layers in the profile's order; if each layer feeds the next,
there are no others. The other downsets of a graph with branches are in
`planner.solver.problem.downsets`. A stage is a pair of states, one of which contains the other. Its
work depends on nothing else, which makes the search exact.

Values that are live at the first state I and that no layer of the stage uses pass by the stage.
With front(I) the bytes live at I, and passing(I, J) those among them that no layer of J \\ I uses,

    received activations = front(I) - passing(I, J)
    sent activations     = front(J) - passing(I, J)

and the same for gradients in the other direction.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.memo import Memo
from planner.cost.work import Floats, Footprint, Integers, Work, working_bytes

_TIMES = ("forward_s", "backward_s", "update_s", "accumulate_s", "backward_weight_s")
FRONTS = ("sent_bytes", "returned_bytes", "outputs", "gradients", "output_bytes", "gradient_bytes")
_BYTES = ("gradient_bytes", "weight_bytes", "optimizer_bytes", "buffer_bytes", "saved_bytes")
COUNTED = _TIMES + _BYTES  # quantities that are sums over a stage's layers


class CutSpace(ABC):
    """States in an order in which each comes after those that it contains: the first is empty, the
    last has all layers.

    Attributes:
        layer_costs: of the model.
        compute_s: seconds of the layers of each state, forward, backward and update; ascending.
        memo: what searches know of these stages.
    """

    def __init__(self, layer_costs: LayerCosts, sums: dict[str, Floats], fronts: Floats) -> None:
        """Take the sums of each of `COUNTED` over the layers of all states, and what is live at
        them: `FRONTS`.
        """
        self.layer_costs = layer_costs
        self._sums = sums
        self._fronts = fronts
        self.compute_s = sums["forward_s"] + sums["backward_s"] + sums["update_s"]
        self.memo = Memo()

    def __len__(self) -> int:
        return len(self.compute_s)

    @abstractmethod
    def spread(self, most: int) -> Integers:
        """Return about so many states at equal distances, each of which contains the one before,
        with both ends.
        """

    @abstractmethod
    def rough(self, most: int) -> Integers | None:
        """Return about so many states, over which a search finds a start; None where all of them
        are few enough.
        """

    @abstractmethod
    def only(self, states: Integers) -> "CutSpace":
        """Return the space of these states, which must include both ends."""

    @abstractmethod
    def holds(self, layer: int) -> NDArray[np.bool_]:
        """Return which states contain the layer at this position."""

    @abstractmethod
    def containing(self, state: int, ends: Integers) -> Integers:
        """Return those of `ends`, all of which come after the state, that contain it."""

    @abstractmethod
    def between(self, state: int, end: int) -> Integers:
        """Return the states at which the stage from `state` to `end` may be cut in two,
        ascending.
        """

    @abstractmethod
    def cuts_at(self, targets_s: Floats) -> list[int] | None:
        """Return states at about these seconds of compute, each inside the next; None where two
        would be the same.

        None of them is the first or the last state.
        """

    @abstractmethod
    def state_of(self, layers: frozenset[int]) -> int | None:
        """Return the state that has these layers; None without one."""

    @abstractmethod
    def span(self, state: int, end: int) -> Sequence[int]:
        """Return the positions of the layers in `end` but not in `state`, ascending; as a key for
        dictionaries.
        """

    @abstractmethod
    def passing(self, state: int, ends: Integers) -> Floats | None:
        """Return what passes by the stage up to each of `ends`, a row for each of `FRONTS`; None
        if nothing does.
        """

    @abstractmethod
    def _working(self, state: int, ends: Integers) -> tuple[Floats, Floats, Floats]:
        """Return the working, accumulating and updating bytes; 0 each of a profile without
        workspaces.
        """

    def after(self, state: int) -> Integers:
        """Return the states that contain this one, without itself."""
        return self.containing(state, np.arange(state + 1, len(self)))

    def layers(self, state: int, end: int) -> tuple[int, ...]:
        """Return the positions of the layers in `end` but not in `state`, ascending."""
        return tuple(self.span(state, end))

    def members(self, state: int, end: int) -> frozenset[int]:
        """Return the layers as a set, which is made once: plans have most of their stages in
        common.
        """
        if (state, end) not in self._members:
            self._members[state, end] = frozenset(self.layers(state, end))
        return self._members[state, end]

    @cached_property
    def _members(self) -> dict[tuple[int, int], frozenset[int]]:
        return {}

    def sides(self, state: int, ends: Integers) -> tuple[Floats, Floats]:
        """Return what the stages up to `ends` exchange with earlier stages and with later ones,
        as in `FRONTS`.
        """
        before = self._fronts[:, state, None]
        after = self._fronts[:, ends]
        by = self.passing(state, ends)
        if by is None:
            return np.broadcast_to(before, after.shape), after
        return before - by, after - by

    def work(self, state: int, ends: Integers) -> Work:
        """Return the work of the stages from the state to each of `ends`."""
        left, right = self.sides(state, ends)
        held = partial(self._held, state, ends)
        return Work(
            forward_s=held("forward_s"),
            backward_s=held("backward_s"),
            update_s=held("update_s"),
            accumulate_s=held("accumulate_s"),
            backward_weight_s=held("backward_weight_s"),
            trainable_bytes=held("gradient_bytes"),
            # Activations come from earlier stages (left) and go to later ones (right), gradients
            # the other way.
            received_bytes=left[0] + right[1],
            sent_bytes=right[0] + left[1],
            received_messages=left[2] + right[3],
            sent_messages=right[2] + left[3],
            input_bytes=left[4],
            message_bytes=(left + right)[4:].sum(axis=0),
            neighbours=(left[2] > 0).astype(np.int64) + (right[2] > 0),
        )

    def footprint(self, state: int, ends: Integers, work: Work) -> Footprint:
        """Return the footprint of the stages from the state to each of `ends`, whose work is
        known.
        """
        held = partial(self._held, state, ends)
        working, accumulating, updating = self._working(state, ends)
        return Footprint(
            weight_bytes=held("weight_bytes"),
            gradient_bytes=work.trainable_bytes,
            optimizer_bytes=held("optimizer_bytes"),
            buffer_bytes=held("buffer_bytes") + self.layer_costs.communicators_bytes(work),
            saved_bytes=held("saved_bytes"),
            message_bytes=self.layer_costs.message_buffers * work.message_bytes,
            input_bytes=work.input_bytes,
            working_bytes=working,
            accumulating_bytes=accumulating,
            updating_bytes=updating,
        )

    def _held(self, state: int, ends: Integers, name: str) -> Floats:
        return np.asarray(self._sums[name][ends] - self._sums[name][state])


class Chain(CutSpace):
    """The first layers in the profile's order, up to each legal cut: `no_cut_after` does not forbid
    it.
    """

    def __init__(self, layer_costs: LayerCosts, states: Integers | None = None) -> None:
        """Take all of them, or some `states` by number, with both ends."""
        # 1. How many layers are before each state.
        groups = uncut_groups(layer_costs)
        cuts = np.cumsum([0, *map(len, groups)])
        if states is None:
            states = np.arange(len(cuts))
        self._states = states
        self._before = cuts[states]

        # 2. The sums over these layers.
        sums: dict[str, Floats] = {}
        for name in COUNTED:
            running = np.cumsum(column(layer_costs, name))
            sums[name] = np.concatenate(([0.0], running))[self._before]

        # 3. Each value's producer, its users ascending, and what it adds to a front: where it is
        #    produced, and needed by a later user.
        self._values = []
        layers = cuts[-1]
        fronts = np.zeros((len(FRONTS), layers + 1))
        for value in layer_costs.traffic:
            users = sorted(value.users)
            self._values.append((value.producer, users, value.amounts))
            fronts[:, value.producer + 1 : users[-1] + 1] += value.amounts[:, None]

        super().__init__(layer_costs, sums, fronts[:, self._before])

    def spread(self, most: int) -> Integers:
        return np.unique(np.linspace(0, len(self) - 1, most).astype(np.int64))

    def rough(self, most: int) -> Integers | None:
        if len(self) > 2 * most:
            return self.spread(most)
        return None

    def only(self, states: Integers) -> "Chain":
        return Chain(self.layer_costs, self._states[states])

    def holds(self, layer: int) -> NDArray[np.bool_]:
        return np.asarray(self._before > layer)

    def containing(self, state: int, ends: Integers) -> Integers:
        return ends

    def between(self, state: int, end: int) -> Integers:
        return np.arange(state + 1, end)

    def cuts_at(self, targets_s: Floats) -> list[int] | None:
        middles_s = (self.compute_s[1:] + self.compute_s[:-1]) / 2
        cuts: list[int] = np.searchsorted(middles_s, targets_s).tolist()
        ascending = all(start < end for start, end in pairwise((0, *cuts, len(self) - 1)))
        return cuts if ascending else None

    def state_of(self, layers: frozenset[int]) -> int | None:
        count = len(layers)
        state = int(np.searchsorted(self._before, count))
        if self._before[state] != count or max(layers, default=-1) >= count:
            return None
        return state

    def span(self, state: int, end: int) -> range:
        return range(int(self._before[state]), int(self._before[end]))

    def passing(self, state: int, ends: Integers) -> Floats | None:
        """Sum live values by their next use: a value passes every stage that ends before it."""
        uses, sums = self._next_uses[state]
        if not len(uses):
            return None
        return np.asarray(sums[:, np.searchsorted(uses, self._before[ends], side="left")])

    def _working(self, state: int, ends: Integers) -> tuple[Floats, Floats, Floats]:
        at_work = self.layer_costs.at_work
        if at_work is None:
            nothing = np.asarray(0.0)
            return nothing, nothing, nothing

        first = self._before[state]
        layers = at_work[:, first : self._before[np.max(ends)]]
        working, accumulating = working_bytes(*layers[:3])
        updating = np.maximum.accumulate(layers[3])
        last = self._before[ends] - first - 1
        return working[last], accumulating[last], updating[last]

    @cached_property
    def _next_uses(self) -> list[tuple[Integers, Floats]]:
        """The next uses of each state's live values, ascending, and the sums of `FRONTS` from each
        use on.

        A value that the next group uses is left out, because it passes by no stage.
        """
        live: list[list[tuple[int, Floats]]] = [[] for _ in range(len(self))]
        for producer, users, weights in self._values:
            last = producer
            for user in users:
                # States that contain `last` but not `user`; the stage from the last of them begins
                # with the user.
                first, end = np.searchsorted(self._before, (last, user), side="right")
                for state in range(first, end - 1):
                    live[state].append((user, weights))
                last = user

        return [_sums_from_each_use(entries) for entries in live]


def _sums_from_each_use(entries: list[tuple[int, Floats]]) -> tuple[Integers, Floats]:
    """Return uses, ascending, and the sums of what is used from each on; 0 after the last."""
    entries.sort(key=lambda entry: entry[0])
    uses = np.array([use for use, _ in entries], dtype=np.int64)
    sums = np.zeros((len(FRONTS), len(entries) + 1))
    if entries:
        last_first = np.stack([weights for _, weights in entries[::-1]], axis=1)
        sums[:, :-1] = np.cumsum(last_first, axis=1)[:, ::-1]

    return uses, sums


def uncut_groups(layer_costs: LayerCosts) -> list[tuple[int, ...]]:
    """Return the runs of consecutive layers that no cut may separate, by position; most have one
    layer.
    """
    profile = layer_costs.profile
    forbidden = set(profile.no_cut_after)
    last = len(profile.layers)
    ends = [
        end
        for end, layer in enumerate(profile.layers, 1)
        if layer.name not in forbidden or end == last
    ]

    return [tuple(range(first, end)) for first, end in pairwise([0, *ends])]


def column(layer_costs: LayerCosts, name: str) -> Floats:
    """Return one quantity of every layer."""
    return np.array(
        [getattr(layer, name) for layer in layer_costs.profile.layers], dtype=np.float64
    )
