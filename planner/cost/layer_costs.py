"""Costs of a profile's layers: work and memory of any stage of them, and the values that stages exchange.

Written from the definitions, stage by stage, with sets: slow and plain, and the reference for the searches.

Where groups of a stage's layers recompute, a group keeps the values that enter it, for every microbatch in flight.
Before its own backward it runs its forward again, and what its layers save exists then, for the one microbatch (Chen et
al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4, where every layer is in a group). A value that
enters several groups is kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.candidate import Candidate, Groups, StageOptions, Traffic
from planner.cost.overheads import Overheads
from planner.cost.work import Floats, Footprint, Integers, Work, working_bytes
from planner.formats.cluster import DeviceKind
from planner.formats.device_kinds import profile_on
from planner.formats.names import CODECS, FLOAT_BYTES, HALF_BYTES, Codec
from planner.formats.profile import Profile, Value
from planner.plan.blocks import blocks_of

NO_GROUP = -1


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a stage's layers, in their order.

    `gradient_bytes` and `workspace_bytes` are None where the profile does not know them, or not the order.
    """

    saved_bytes: Floats
    gradient_bytes: Floats | None = None
    workspace_bytes: Floats | None = None


@dataclass(frozen=True)
class Kept:
    """Three of the fields of a `Footprint`, for one stage."""

    saved_bytes: float
    working_bytes: float = 0.0
    accumulating_bytes: float = 0.0


def kept_activations(layers: LayerBytes, group_of: Integers, entering_bytes: Floats) -> Kept:
    """Compute what is kept, and the peak.

    While layer k of a group is at work, the stage holds what all layers before the group keep, what enters the group,
    what the group's layers have saved up to k, and for k what `working_bytes` says of any layer. Where that is not
    known, all that the largest group saves is added to all that is kept.

    Args:
        layers: of the stage.
        group_of: the number of each layer's group; `NO_GROUP` for layers that keep what they save.
        entering_bytes: of each layer that is the first of a group: the values that enter it, and no group before it.
    """
    saved, apart = layers.saved_bytes, group_of == NO_GROUP
    kept = np.where(apart, saved, entering_bytes)
    again = [np.flatnonzero(group_of == group) for group in np.unique(group_of[~apart])]
    if layers.gradient_bytes is None or layers.workspace_bytes is None:
        most = max((float(saved[group].sum()) for group in again), default=0.0)
        return Kept(float(kept.sum()), most, most)
    temporary = layers.workspace_bytes.copy()
    for group in again:
        temporary[group] += np.cumsum(saved[group])
    working, accumulating = working_bytes(kept, layers.gradient_bytes, temporary)
    return Kept(float(kept.sum()), float(working[-1]), float(accumulating[-1]))


class LayerCosts:
    """The work and the footprint of any set of a profile's layers.

    Args:
        profile: with the layers.
        versions: of its weights that every stage holds, whatever is in flight; None if the schedule decides.
        tensors_only: whether the devices' overheads count elsewhere, but for the communicators that a stage has in any
            plan: two for earlier stages, two for later ones, and one for its replicas. They count as buffers.
        dividing: returns the profile of the layers on groups of so many ranks (`planner.cost.tensor`).
        codec: of what stages exchange.
    """

    def __init__(
        self,
        profile: Profile,
        versions: int | None = None,
        *,
        tensors_only: bool = False,
        dividing: Callable[[Profile, int], Profile] | None = None,
        codec: Codec = CODECS["none"],
    ) -> None:
        self.profile, self.versions, self.tensors_only = profile, versions, tensors_only
        self._dividing, self._codec = dividing, codec
        overheads = Overheads.of(profile.device)
        self.overheads = None if tensors_only else overheads
        self._communicator_bytes = overheads.communicator_as_tensors if tensors_only and overheads is not None else 0
        self.position = {layer.name: index for index, layer in enumerate(profile.layers)}
        self._works: dict[tuple[frozenset[int], frozenset[int], Groups], Work] = {}
        self._footprints: dict[tuple[frozenset[int], frozenset[int], Groups], Footprint] = {}
        self._about: list[LayerCosts] = []
        self._on: dict[tuple[str | None, float], LayerCosts] = {}
        self._at: dict[int, LayerCosts] = {}

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Every value that some layer uses."""
        users: dict[tuple[str, str], set[int]] = {}
        for edge in self.profile.edges:
            users.setdefault((edge.source, edge.value), set()).add(self.position[edge.target])
        return tuple(
            Traffic(
                value.name, index, tuple(sorted(used)), value.output_bytes, value.gradient_bytes, *self._sent(value)
            )
            for index, layer in enumerate(self.profile.layers)
            for value in layer.outputs
            if (used := users.get((layer.name, value.name)))
        )

    def _sent(self, value: Value) -> tuple[int, int]:
        """Return the bytes of a value and of its gradient on a link."""
        sizes = value.output_bytes, value.gradient_bytes
        element_bytes = value.element_bytes or (FLOAT_BYTES if self.profile.autocast is None else HALF_BYTES)
        coded = [self._codec.size_bytes(size, element_bytes) for size in sizes]
        return (coded[0], coded[1]) if value.gradient_bytes else sizes

    @cached_property
    def uses(self) -> Integers:
        """A column for every use of a value: its number in `traffic`, the layer that makes it, the one that uses it."""
        rows = [(number, t.producer, user) for number, t in enumerate(self.traffic) for user in t.users]
        return np.asarray(np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    def with_profile(self, profile: Profile) -> LayerCosts:
        """Return the costs of another profile's layers under the same rule for versions."""
        # Searches ask for the same variants of a profile again and again, and what is known of their stages is of use.
        for known in self._about:
            if known.profile == profile:
                return known
        self._about.append(self._changed(profile=profile))
        return self._about[-1]

    def on_kind(self, kind: DeviceKind | None) -> LayerCosts:
        """Return the costs of the same layers on devices of that kind; None for the profiled one."""
        if kind is None:
            return self
        key = kind.name, kind.speed
        if key not in self._on:
            self._on[key] = self.with_profile(profile_on(self.profile, kind))
        return self._on[key]

    def at_degree(self, degree: int) -> LayerCosts:
        """Return the costs of the same layers on groups of so many ranks.

        Raises:
            ProfileError: if the profile does not know them.
        """
        if degree == 1:
            return self
        if degree not in self._at:
            assert self._dividing is not None, "layers are divided over the links of a cluster"
            self._at[degree] = self.with_profile(self._dividing(self.profile, degree))
        return self._at[degree]

    def with_options(self, options: StageOptions) -> LayerCosts:
        """Return the costs of the same layers on the devices of a stage, one of the profiled kind by itself."""
        return self.on_kind(options.kind).at_degree(options.tensor)

    def holding(self, versions: int) -> LayerCosts:
        """Return the costs of the same layers where every stage holds so many versions of its weights."""
        return self._changed(versions=versions)

    @cached_property
    def of_tensors(self) -> LayerCosts:
        """The same costs, where the devices' overheads count elsewhere."""
        return self._changed(tensors_only=True)

    def _changed(self, **changes: Any) -> LayerCosts:
        own = {name: getattr(self, name) for name in ("profile", "versions", "tensors_only")}
        return LayerCosts(**(own | {"dividing": self._dividing, "codec": self._codec} | changes))

    def weights(self, weight_bytes: Floats) -> dict[str, Floats]:
        """Return the two fields of a footprint for stages whose weights are of this size."""
        if self.versions is None:
            return {"weight_bytes": weight_bytes}
        return {"weight_bytes": np.zeros_like(weight_bytes), "fixed_weight_bytes": self.versions * weight_bytes}

    def communicators_bytes(self, work: Work) -> Floats:
        """Return the bytes of a stage's communicators for other stages, where they count as buffers."""
        return np.asarray(2.0 * self._communicator_bytes * work.neighbours)

    @property
    def counts_replicas(self) -> bool:
        """Whether a stage on several replicas holds a buffer that one alone does not."""
        return self._communicator_bytes > 0

    def replicated(self, footprint: Footprint, replicas: ArrayLike) -> Footprint:
        """Return the footprint of a stage on so many replicas: several have a communicator, which may be a buffer."""
        if not self.counts_replicas:
            return footprint
        more_bytes = float(self._communicator_bytes) * (np.asarray(replicas) > 1)
        return replace(footprint, buffer_bytes=footprint.buffer_bytes + more_bytes)

    @property
    def single_stage(self) -> Candidate:
        """All layers as one stage, on one profiled device."""
        return Candidate(frozenset(), frozenset(range(len(self.profile.layers))))

    @cached_property
    def everything(self) -> Work:
        """The work of all layers as one stage, on one profiled device."""
        return self.work(self.single_stage)

    def work(self, stage: Candidate) -> Work:
        """Compute the stage's work for one microbatch."""
        if (own := self.with_options(stage.options)) is not self:
            return own.work(_by_itself(stage))
        key = stage.before, stage.layers, stage.options.recompute
        if key not in self._works:
            self._works[key] = self._work(stage)
        return self._works[key].shared_out() if stage.options.sharded else self._works[key]

    def _work(self, stage: Candidate) -> Work:
        if stage.options.recompute:
            again = (self.profile.layers[index] for group in stage.options.recompute for index in sorted(group))
            plain = self.work(replace(stage, options=StageOptions()))
            return replace(plain, recompute_s=np.float64(sum(layer.forward_s for layer in again)))
        layers = [self.profile.layers[index] for index in sorted(stage.layers)]
        done = stage.before | stage.layers
        arriving = [t for t in self.traffic if t.producer in stage.before and stage.layers.intersection(t.users)]
        leaving = [t for t in self.traffic if stage.layers.intersection((t.producer, *t.users)) and set(t.users) - done]
        return Work(
            forward_s=np.float64(sum(layer.forward_s for layer in layers)),
            backward_s=np.float64(sum(layer.backward_s for layer in layers)),
            update_s=np.float64(sum(layer.update_s for layer in layers)),
            accumulate_s=np.float64(sum(layer.accumulate_s for layer in layers)),
            trainable_bytes=np.float64(sum(layer.gradient_bytes for layer in layers)),
            received_bytes=np.float64(_outputs(arriving) + _gradients(leaving)),
            sent_bytes=np.float64(_outputs(leaving) + _gradients(arriving)),
            received_messages=np.float64(len(arriving) + _with_gradient(leaving)),
            sent_messages=np.float64(len(leaving) + _with_gradient(arriving)),
            cut_before_bytes=np.float64(_outputs(self.crossing(stage.before))),
            cut_after_bytes=np.float64(_outputs(self.crossing(done))),
            is_first=np.asarray(not stage.before),
            input_bytes=np.float64(sum(value.output_bytes for value in arriving)),
            message_bytes=np.float64(sum(value.output_bytes + value.gradient_bytes for value in arriving + leaving)),
            neighbours=np.asarray(bool(arriving) + bool(leaving)),
        )

    @cached_property
    def at_work(self) -> Floats | None:
        """Each layer's saved bytes, gradients, workspace and workspace of its update; None if the profile lacks these.

        The rule needs the order in which layers run: stages of trainable models keep the profile's order, those of
        imported profiles may not.
        """
        layers = self.profile.layers
        if not self.profile.trainable or not any(layer.workspace_bytes for layer in layers):
            return None
        names = ("saved_bytes", "gradient_bytes", "workspace_bytes", "update_workspace_bytes")
        return np.array([[getattr(layer, name) for layer in layers] for name in names], dtype=np.float64)

    def crossing(self, done: frozenset[int]) -> list[Traffic]:
        """Return the values that layers of `done` make and others use."""
        return [t for t in self.traffic if t.producer in done and set(t.users) - done]

    def footprint(self, stage: Candidate) -> Footprint:
        """Compute the stage's memory."""
        if (own := self.with_options(stage.options)) is not self:
            return own.footprint(_by_itself(stage))
        key = stage.before, stage.layers, stage.options.recompute
        if key not in self._footprints:
            self._footprints[key] = self._footprint(stage)
        footprint = self.replicated(self._footprints[key], stage.replicas)
        return footprint.shared_out(stage.replicas) if stage.options.sharded else footprint

    def _footprint(self, stage: Candidate) -> Footprint:
        layers = [self.profile.layers[index] for index in stage.layers]
        work = self.work(stage)
        kept = self._kept(stage)
        return Footprint(
            **self.weights(np.asarray(sum(layer.weight_bytes for layer in layers), dtype=np.float64)),
            gradient_bytes=np.float64(sum(layer.gradient_bytes for layer in layers)),
            optimizer_bytes=np.float64(sum(layer.optimizer_bytes for layer in layers)),
            buffer_bytes=np.float64(sum(layer.buffer_bytes for layer in layers)) + self.communicators_bytes(work),
            saved_bytes=np.float64(kept.saved_bytes),
            message_bytes=work.message_bytes,
            input_bytes=work.input_bytes,
            working_bytes=np.float64(kept.working_bytes),
            accumulating_bytes=np.float64(kept.accumulating_bytes),
            updating_bytes=np.float64(0.0 if self.at_work is None else self.at_work[3, list(stage.layers)].max()),
        )

    def _kept(self, stage: Candidate) -> Kept:
        """Compute what the stage keeps for its backward, and its peak."""
        order, known = sorted(stage.layers), self.at_work
        if known is not None:
            layers = LayerBytes(*known[:3, order])
        else:
            layers = LayerBytes(np.array([self.profile.layers[index].saved_bytes for index in order], dtype=np.float64))
        place = {layer: number for number, layer in enumerate(order)}
        group_of, entering_bytes = np.full(len(order), NO_GROUP), np.zeros(len(order))
        kept: set[int] = set()
        for number, group in enumerate(sorted(stage.options.recompute, key=min)):
            group_of[[place[layer] for layer in group]] = number
            values = self.entering(group) - kept
            entering_bytes[place[min(group)]] = sum(self.traffic[value].output_bytes for value in values)
            kept |= values
        return kept_activations(layers, group_of, entering_bytes)

    @cached_property
    def block_of(self) -> list[int]:
        """The number of each layer's block."""
        return [number for number, block in enumerate(blocks_of(self.profile)) for _ in block]

    @cached_property
    def _used(self) -> list[list[int]]:
        """The values that each layer uses, by their numbers in `traffic`."""
        used: list[list[int]] = [[] for _ in self.profile.layers]
        for number, value in enumerate(self.traffic):
            for layer in value.users:
                used[layer].append(number)
        return used

    def entering(self, group: Collection[int]) -> set[int]:
        """Return the values that layers of the group use and others make, by their numbers in `traffic`."""
        return {value for layer in group for value in self._used[layer] if self.traffic[value].producer not in group}


def _by_itself(stage: Candidate) -> Candidate:
    return replace(stage, options=replace(stage.options, kind=None, tensor=1))


def exchanges(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> dict[tuple[int, int], Floats]:
    """Return what pairs of stages exchange, as `Traffic.amounts`."""
    return {
        ends: np.sum([value.amounts for value in values], axis=0)
        for ends, values in messages(layer_costs, stages).items()
    }


def messages(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> dict[tuple[int, int], list[Traffic]]:
    """Return the values that each pair of stages exchanges: from the producer to its first user, and on to the next."""
    stage_of = np.zeros(len(layer_costs.profile.layers), dtype=np.int64)
    for number, stage in enumerate(stages):
        stage_of[list(stage.layers)] = number
    values, producers, users = layer_costs.uses
    found: dict[tuple[int, int], list[Traffic]] = {}
    # Most values stay within their stage.
    for number in np.unique(values[stage_of[producers] != stage_of[users]]):
        value = layer_costs.traffic[number]
        for ends in pairwise(sorted({int(stage_of[layer]) for layer in (value.producer, *value.users)})):
            found.setdefault(ends, []).append(value)
    return found


def _outputs(values: Sequence[Traffic]) -> int:
    return sum(value.sent_bytes for value in values)


def _gradients(values: Sequence[Traffic]) -> int:
    return sum(value.returned_bytes for value in values)


def _with_gradient(values: Sequence[Traffic]) -> int:
    return sum(value.gradient_bytes > 0 for value in values)
