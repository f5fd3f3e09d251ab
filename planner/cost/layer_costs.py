"""Costs of layers, stage by stage from the definitions: slow and plain, and the reference for the searches."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.candidate import Candidate, Groups, StageOptions, Traffic
from planner.cost.memo import Memo
from planner.cost.overheads import Overheads
from planner.cost.work import Floats, Footprint, Integers, Work, working_bytes
from planner.formats.cluster import DeviceKind
from planner.formats.device_kinds import profile_on
from planner.formats.names import CODECS, FLOAT_BYTES, GPU_KINDS, HALF_BYTES, Codec
from planner.formats.plan_parts import Exchanged
from planner.formats.profile import Profile, Shares
from planner.plan.blocks import blocks_of
from planner.plan.lengths import mean_terms
from planner.schedule.instructions import LEAD, POSTED


@dataclass(eq=False, repr=False)
class LayerCosts:
    """The work and the footprint of any set of a profile's layers."""

    profile: Profile
    # Whether the devices' overheads count elsewhere, but for the communicators that a stage has in any plan, which
    # count as buffers.
    tensors_only: bool = False
    # Returns the profile of the layers on groups of so many ranks, and what each of them exchanges, where messages
    # cross the same links (`planner.cost.tensor`).
    dividing: Callable[[Profile, int], tuple[Profile, Sequence[Exchanged] | None]] | None = None
    codec: Codec = CODECS["none"]  # of what stages exchange
    source: Profile | None = None  # as it was before its times became means over lengths
    exchanges: Sequence[Exchanged] | None = None

    def __post_init__(self) -> None:
        overheads = Overheads.of(self.profile.device)
        self.overheads = None if self.tensors_only else overheads
        self._communicator_bytes = 0
        if self.tensors_only and overheads is not None:  # nothing of a communicator is fragmented
            self._communicator_bytes = math.floor(overheads.communicator_bytes / (1 + overheads.fragmented))
        self.position = {layer.name: index for index, layer in enumerate(self.profile.layers)}
        self._works: dict[tuple[frozenset[int], frozenset[int], Groups], Work] = {}
        self._footprints: dict[tuple[frozenset[int], frozenset[int], Groups], Footprint] = {}
        self._about: list[LayerCosts] = []
        self.memo = Memo()  # of what searches know of these layers
        self._variants: dict[tuple[str | None, float] | int, LayerCosts] = {}  # by kind of device, and by degree

    @property
    def given(self) -> Profile:
        return self.source or self.profile

    @cached_property
    def _mean_terms(self) -> Floats:
        return mean_terms(self.profile)

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Every value that some layer uses."""
        users: dict[tuple[str, str], set[int]] = {}
        for edge in self.profile.edges:
            users.setdefault((edge.source, edge.value), set()).add(self.position[edge.target])
        found, lengths = [], self.profile.lengths
        for index, layer in enumerate(self.profile.layers):
            for number, value in enumerate(layer.outputs):
                sizes = value.output_bytes, value.gradient_bytes
                element_bytes = value.element_bytes or (FLOAT_BYTES if self.profile.autocast is None else HALF_BYTES)
                coded = (self.codec.size_bytes(size, element_bytes) for size in sizes)
                sent = tuple(coded) if value.gradient_bytes else sizes  # values without gradients travel as they are
                shares: Shares = ()
                if lengths is not None:  # memory has room for the longest
                    fit = lengths.layers[index].outputs[number]
                    mean = float(np.dot(fit.shares, self._mean_terms)) or 1.0  # of a value without elements
                    sent = tuple(round(size * mean) for size in sent)
                    shares = tuple(share / mean for share in fit.shares)
                if used := users.get((layer.name, value.name)):
                    found.append(Traffic(value.name, index, tuple(sorted(used)), *sizes, sent[0], sent[1], shares))
        return tuple(found)

    def shares(self, stage: Candidate, name: str, seconds: float) -> Shares:
        """Return the shares of a stage's `seconds` by the terms of lengths, of which its layers have what `name` says.

        The rest, such as waiting for weights, does not depend on lengths.
        """
        profile = self.with_options(stage.options).profile
        if (lengths := profile.lengths) is None or seconds <= 0:
            return ()
        costs = np.array([getattr(profile.layers[layer], name) for layer in stage.layers])
        fits = np.array([getattr(lengths.layers[layer], name).shares for layer in stage.layers])
        # The costs are means already.
        found = costs / np.maximum(fits @ self._mean_terms, np.finfo(np.float64).tiny) @ fits / seconds
        found[0] += 1 - costs.sum() / seconds
        return tuple(found.tolist())

    @cached_property
    def uses(self) -> Integers:
        """A column for every use of a value: its number in `traffic`, the layer that makes it, the one that uses it."""
        rows = [(number, t.producer, user) for number, t in enumerate(self.traffic) for user in t.users]
        return np.asarray(np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    def with_profile(self, profile: Profile) -> "LayerCosts":
        """Return the costs of another profile's layers; always the same ones, which remember their stages."""
        known = next((each for each in self._about if each.profile == profile), None)
        if known is None:
            self._about.append(known := replace(self, profile=profile))
        return known

    def on_kind(self, kind: DeviceKind | None) -> "LayerCosts":
        """Return the costs on devices of that kind; None for the profiled one."""
        if kind is None:
            return self
        key = kind.name, kind.speed
        if key not in self._variants:
            self._variants[key] = self.with_profile(profile_on(self.profile, kind))
        return self._variants[key]

    def at_degree(self, degree: int) -> "LayerCosts":
        """Return the costs on groups of so many ranks; raise ProfileError if they are not known."""
        if degree == 1:
            return self
        if degree not in self._variants:
            assert self.dividing is not None, "layers are divided over the links of a cluster"
            profile, exchanges = self.dividing(self.profile, degree)
            self._variants[degree] = replace(self.with_profile(profile), exchanges=exchanges)
        return self._variants[degree]

    def with_options(self, options: StageOptions) -> "LayerCosts":
        return self.on_kind(options.kind).at_degree(options.tensor)

    def exchanged(self, stage: Candidate) -> Exchanged | None:
        """Return what a rank of the stage sends to the others of its group over links that messages cross."""
        if (known := self.with_options(stage.options).exchanges) is None:
            return None
        own = [known[layer] for layer in stage.layers]
        sums = {name: sum(getattr(each, name) for each in own) for name in ("forward_bytes", "backward_bytes")}
        return Exchanged(**sums, bytes_per_s=own[0].bytes_per_s) if any(sums.values()) else None

    @cached_property
    def of_tensors(self) -> "LayerCosts":
        return replace(self, tensors_only=True)

    def communicators_bytes(self, work: Work) -> Floats:
        """Return the bytes of a stage's communicators for other stages, where they count as buffers: two for each."""
        return np.asarray(2.0 * self._communicator_bytes * work.neighbours)

    @property
    def counts_replicas(self) -> bool:
        """Whether a stage on several replicas holds a buffer that one alone does not."""
        return self._communicator_bytes > 0

    def replicated(self, footprint: Footprint, replicas: ArrayLike) -> Footprint:
        if not self.counts_replicas:
            return footprint
        more_bytes = float(self._communicator_bytes) * (np.asarray(replicas) > 1)
        return replace(footprint, buffer_bytes=footprint.buffer_bytes + more_bytes)

    @property
    def single_stage(self) -> Candidate:
        return Candidate(frozenset(), frozenset(range(len(self.profile.layers))))

    @cached_property
    def everything(self) -> Work:
        """The work of all layers as one stage, on one profiled device."""
        return self.work(self.single_stage)

    def work(self, stage: Candidate) -> Work:
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
        times = ("forward_s", "backward_s", "update_s", "accumulate_s")
        come, go = (sum((value.amounts for value in values), np.zeros(6)) for values in (arriving, leaving))
        return Work(
            **{name: np.float64(sum(getattr(layer, name) for layer in layers)) for name in times},
            trainable_bytes=np.float64(sum(layer.gradient_bytes for layer in layers)),
            received_bytes=come[0] + go[1],
            sent_bytes=go[0] + come[1],
            received_messages=come[2] + go[3],
            sent_messages=go[2] + come[3],
            input_bytes=come[4],
            message_bytes=come[4] + come[5] + go[4] + go[5],
            neighbours=np.asarray(bool(arriving) + bool(leaving)),
        )

    @cached_property
    def at_work(self) -> Floats | None:
        """Each layer's saved bytes, gradients, workspace and update's workspace; None if the profile lacks these."""
        layers = self.profile.layers
        if not any(layer.workspace_bytes for layer in layers):
            return None
        names = ("saved_bytes", "gradient_bytes", "workspace_bytes", "update_workspace_bytes")
        return np.array([[getattr(layer, name) for layer in layers] for name in names], dtype=np.float64)

    def crossing(self, done: frozenset[int]) -> list[Traffic]:
        return [t for t in self.traffic if t.producer in done and set(t.users) - done]

    def footprint(self, stage: Candidate) -> Footprint:
        if (own := self.with_options(stage.options)) is not self:
            return own.footprint(_by_itself(stage))
        key = stage.before, stage.layers, stage.options.recompute
        if key not in self._footprints:
            self._footprints[key] = self._footprint(stage)
        footprint = self.replicated(self._footprints[key], stage.replicas)
        return footprint.shared_out(stage.replicas) if stage.options.sharded else footprint

    @property
    def message_buffers(self) -> int:
        """Buffers for each message of a microbatch."""
        # Over NCCL those that the host has taken and the GPU not passed count, too. Of all messages at most half are
        # received, so LEAD of them are no more than those of LEAD / 2 microbatches.
        return POSTED + LEAD // 2 if self.profile.device.kind in GPU_KINDS else POSTED

    def _footprint(self, stage: Candidate) -> Footprint:
        layers = [self.profile.layers[index] for index in stage.layers]
        work = self.work(stage)
        return Footprint(
            **self._kept(stage),
            weight_bytes=np.float64(sum(layer.weight_bytes for layer in layers)),
            gradient_bytes=np.float64(sum(layer.gradient_bytes for layer in layers)),
            optimizer_bytes=np.float64(sum(layer.optimizer_bytes for layer in layers)),
            buffer_bytes=np.float64(sum(layer.buffer_bytes for layer in layers)) + self.communicators_bytes(work),
            message_bytes=self.message_buffers * work.message_bytes,
            input_bytes=work.input_bytes,
            updating_bytes=np.float64(0.0 if self.at_work is None else self.at_work[3, list(stage.layers)].max()),
        )

    def _kept(self, stage: Candidate) -> dict[str, Floats]:
        """Compute three of the footprint's fields: what the stage keeps for its backward, and its peaks.

        A group that recomputes keeps the values that enter it, each once, for every microbatch in flight. While its
        layer k is at work, the stage holds what all layers before the group keep, what enters the group, what the
        group's layers have saved up to k, and for k what `working_bytes` says of any layer (Chen et al., "Training Deep
        Nets with Sublinear Memory Cost", 2016, section 4). Where that is not known, all that the largest group saves is
        added to all that is kept.
        """
        order = sorted(stage.layers)
        saved = np.array([self.profile.layers[index].saved_bytes for index in order], dtype=np.float64)
        kept, running, most, seen = saved.copy(), np.zeros(len(order)), 0.0, set[int]()
        place = {layer: number for number, layer in enumerate(order)}
        for group in sorted(stage.options.recompute, key=min):
            places = [place[layer] for layer in sorted(group)]
            kept[places], running[places] = 0.0, np.cumsum(saved[places])
            values = self.entering(group) - seen
            kept[places[0]] = sum(self.traffic[value].output_bytes for value in values)
            most, seen = max(most, float(running[places[-1]])), seen | values
        working = accumulating = np.float64(most)
        if self.at_work is not None:
            _, gradients, workspaces, _ = self.at_work[:, order]
            peaks = working_bytes(kept, gradients, workspaces + running)
            working, accumulating = (np.float64(each[-1]) for each in peaks)
        return {"saved_bytes": np.float64(kept.sum()), "working_bytes": working, "accumulating_bytes": accumulating}

    @cached_property
    def block_of(self) -> list[int]:
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
