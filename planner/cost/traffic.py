"""The values that layers pass on to others, and which of them cross the ends of a stage."""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.cost.candidate import Candidate, Traffic
from planner.cost.work import Floats, Integers
from planner.formats.names import FLOAT_BYTES, HALF_BYTES, Codec
from planner.formats.profile import Profile
from planner.plan.lengths import mean_terms


class PassedValues:
    """The values that the layers of a model pass on, by their numbers in `traffic`."""

    profile: Profile
    codec: Codec  # of what stages exchange

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Every value that some layer uses."""
        return traffic_of(self.profile, self.codec)

    @cached_property
    def uses(self) -> Integers:
        """A column for each use of a value: its number, the layer that makes it, and its user."""
        rows: list[tuple[int, int, int]] = []
        for number, value in enumerate(self.traffic):
            rows += [(number, value.producer, user) for user in value.users]
        return np.asarray(np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    @cached_property
    def _used(self) -> list[list[int]]:
        """The values that each layer uses."""
        used: list[list[int]] = [[] for _ in self.profile.layers]
        for number, value in enumerate(self.traffic):
            for layer in value.users:
                used[layer].append(number)
        return used

    def entering(self, group: Collection[int]) -> set[int]:
        """Return the values that layers of the group use and others make."""
        used = {value for layer in group for value in self._used[layer]}
        return {value for value in used if self.traffic[value].producer not in group}


def traffic_of(profile: Profile, codec: Codec) -> tuple[Traffic, ...]:
    """Return every value that some layer uses.

    Args:
        profile: whose layers make and use the values.
        codec: of what stages exchange. Values without gradients travel as they are.
    """
    position = {layer.name: index for index, layer in enumerate(profile.layers)}
    users: dict[tuple[str, str], set[int]] = {}
    for edge in profile.edges:
        users.setdefault((edge.source, edge.value), set()).add(position[edge.target])
    usual_bytes = HALF_BYTES
    if profile.autocast is None:
        usual_bytes = FLOAT_BYTES
    terms = None if profile.lengths is None else mean_terms(profile)

    traffic: list[Traffic] = []
    for index, layer in enumerate(profile.layers):
        for number, value in enumerate(layer.outputs):
            used_by = users.get((layer.name, value.name))
            if used_by is None:
                continue

            sent_bytes = value.output_bytes
            returned_bytes = value.gradient_bytes
            if returned_bytes:
                element_bytes = value.element_bytes or usual_bytes
                sent_bytes = codec.size_bytes(sent_bytes, element_bytes)
                returned_bytes = codec.size_bytes(returned_bytes, element_bytes)

            shares: tuple[float, ...] = ()
            if profile.lengths is not None and terms is not None:
                # Memory has room for the longest, and links carry the mean.
                fit = profile.lengths.layers[index].outputs[number]
                mean = float(np.dot(fit.shares, terms)) or 1.0  # of a value without elements
                sent_bytes = round(value.output_bytes * mean)
                returned_bytes = round(value.gradient_bytes * mean)
                shares = tuple(share / mean for share in fit.shares)

            made = Traffic(
                value.name,
                index,
                tuple(sorted(used_by)),
                value.output_bytes,
                value.gradient_bytes,
                sent_bytes,
                returned_bytes,
                shares,
            )
            traffic.append(made)

    return tuple(traffic)


def arriving(traffic: Iterable[Traffic], stage: Candidate) -> list[Traffic]:
    """Return the values of earlier stages that a stage uses."""
    made = (value for value in traffic if value.producer in stage.before)
    return [value for value in made if stage.layers.intersection(value.users)]


def leaving(traffic: Iterable[Traffic], stage: Candidate) -> list[Traffic]:
    """Return the values that a stage makes or uses, and that later ones use."""
    done = stage.before | stage.layers
    own = (value for value in traffic if stage.layers.intersection((value.producer, *value.users)))
    return [value for value in own if not done.issuperset(value.users)]


def total_amounts(values: Sequence[Traffic]) -> Floats:
    """Return the sums of `Traffic.amounts`."""
    return sum((value.amounts for value in values), np.zeros(6))


def messages(
    passed: PassedValues,
    stages: Sequence[Candidate],
) -> dict[tuple[int, int], list[Traffic]]:
    """Return the values that each pair of stages exchanges.

    A value goes from the stage that makes it to the first that uses it, and from there on to the
    next.
    """
    stage_of = np.zeros(len(passed.profile.layers), dtype=np.int64)
    for number, stage in enumerate(stages):
        stage_of[list(stage.layers)] = number

    # Most values stay within their stage.
    values, producers, users = passed.uses
    crossing_values = np.unique(values[stage_of[producers] != stage_of[users]])

    exchanged: dict[tuple[int, int], list[Traffic]] = {}
    for number in crossing_values:
        value = passed.traffic[number]
        visited = sorted({int(stage_of[layer]) for layer in (value.producer, *value.users)})
        for pair in pairwise(visited):
            exchanged.setdefault(pair, []).append(value)

    return exchanged
