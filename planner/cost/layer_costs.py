"""Costs of layers, stage by stage from the definitions.

Slow and plain, they are the reference for the searches.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.candidate import Candidate, Groups, StageOptions
from planner.cost.memo import Memo
from planner.cost.overheads import Overheads
from planner.cost.traffic import PassedValues, arriving, leaving, total_amounts
from planner.cost.traffic import messages as messages
from planner.cost.work import Floats, Footprint, Work, working_bytes
from planner.formats.cluster import DeviceKind
from planner.formats.device_kinds import profile_on
from planner.formats.files import replace
from planner.formats.names import CODECS, GPU_KINDS, Codec
from planner.formats.plan_parts import Exchanged
from planner.formats.profile import Profile, Shares
from planner.plan.blocks import blocks_of
from planner.plan.lengths import mean_terms
from planner.schedule.instructions import LEAD, POSTED

# What the work and the footprint of a stage depend on.
_Key = tuple[frozenset[int], frozenset[int], Groups]
_Kind = tuple[str | None, float, tuple[float, ...] | None]  # name, speed, ratios of links


@dataclass(eq=False, repr=False)
class LayerCosts(PassedValues):
    """The work and the footprint of any set of a profile's layers."""

    profile: Profile
    # Whether the devices' overheads count elsewhere, but for the communicators that a stage has in
    # any plan, which count as buffers.
    tensors_only: bool = False
    # Returns the profile of the layers on groups of so many ranks, and what each of them exchanges,
    # where messages cross the same links (`planner.cost.tensor`); of devices of a kind where that
    # is not None.
    dividing: (
        Callable[[Profile, int, DeviceKind | None], tuple[Profile, Sequence[Exchanged] | None]]
        | None
    ) = None
    kind: DeviceKind | None = None  # that the profile is of, where devices are of several
    codec: Codec = CODECS["none"]  # of what stages exchange
    source: Profile | None = None  # as it was before its times became means over lengths
    exchanges: Sequence[Exchanged] | None = None
    # Ranks that divide the layers between them, where a group counts as one GPU.
    group_ranks: int = 1

    def __post_init__(self) -> None:
        overheads = Overheads.of(self.profile.device)
        self.overheads = None if self.tensors_only else overheads
        self._communicator_bytes = 0
        if self.tensors_only and overheads is not None:
            # Nothing of a communicator is fragmented.
            whole_bytes = overheads.communicator_bytes / (1 + overheads.fragmented)
            self._communicator_bytes = math.floor(whole_bytes)

        self.position = {layer.name: index for index, layer in enumerate(self.profile.layers)}
        self._works: dict[_Key, Work] = {}
        self._footprints: dict[_Key, Footprint] = {}
        self._about: list[LayerCosts] = []
        self.memo = Memo()  # of what searches know of these layers
        # By kind of device, and by degree.
        self._variants: dict[_Kind | int, LayerCosts] = {}

    @property
    def given(self) -> Profile:
        """The profile as it was before its times became means over lengths."""
        return self.source or self.profile

    # Other profiles of the same model.

    def with_profile(self, profile: Profile) -> "LayerCosts":
        """Return the costs of another profile's layers.

        Always the same ones, which remember their stages.
        """
        for costs in self._about:
            if costs.profile == profile:
                return costs
        costs = replace(self, profile=profile)
        self._about.append(costs)
        return costs

    def on_kind(self, kind: DeviceKind | None) -> "LayerCosts":
        """Return the costs on devices of that kind; None for the profiled one."""
        if kind is None:
            return self
        key = (kind.name, kind.speed, kind.link_ratios)
        if key not in self._variants:
            costs = self.with_profile(profile_on(self.profile, kind))
            divides = costs.profile.tensor is not None
            self._variants[key] = replace(costs, kind=kind) if divides else costs
        return self._variants[key]

    def at_degree(self, degree: int) -> "LayerCosts":
        """Return the costs on groups of so many ranks; raise ProfileError if they are not known."""
        if degree == 1:
            return self
        if degree not in self._variants:
            assert self.dividing is not None, "layers are divided over the links of a cluster"
            profile, exchanges = self.dividing(self.profile, degree, self.kind)
            self._variants[degree] = replace(
                self.with_profile(profile), exchanges=exchanges, group_ranks=degree
            )

        return self._variants[degree]

    def with_options(self, options: StageOptions) -> "LayerCosts":
        """Return the costs on the devices and groups of ranks of a stage."""
        return self.on_kind(options.kind).at_degree(options.ranks_per_replica)

    @cached_property
    def of_tensors(self) -> "LayerCosts":
        """The costs without the devices' overheads."""
        return replace(self, tensors_only=True)

    # Time.

    @cached_property
    def _mean_terms(self) -> Floats:
        return mean_terms(self.profile)

    def exchanged(self, stage: Candidate) -> Exchanged | None:
        """Return what a rank of the stage sends to its group over links that messages cross."""
        exchanges = self.with_options(stage.options).exchanges
        if exchanges is None:
            return None
        layers = [exchanges[layer] for layer in stage.layers]
        forward_bytes = sum(each.forward_bytes for each in layers)
        backward_bytes = sum(each.backward_bytes for each in layers)
        if not forward_bytes and not backward_bytes:
            return None
        return Exchanged(
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            bytes_per_s=layers[0].bytes_per_s,
        )

    @property
    def single_stage(self) -> Candidate:
        """All layers as one stage."""
        return Candidate(frozenset(), frozenset(range(len(self.profile.layers))))

    @cached_property
    def everything(self) -> Work:
        """The work of all layers as one stage, on one profiled device."""
        return self.work(self.single_stage)

    def work(self, stage: Candidate) -> Work:
        """Return the work of a stage, which is remembered."""
        costs = self.with_options(stage.options)
        if costs is not self:
            return costs.work(_as_profiled(stage))
        key = (stage.before, stage.layers, stage.options.recompute)
        if key not in self._works:
            self._works[key] = self._work(stage)
        work = self._works[key]
        if not stage.options.shards_optimizer:
            return work
        return work.shared_out()

    def _work(self, stage: Candidate) -> Work:
        if stage.options.recomputes:
            again = [layer for group in stage.options.recompute for layer in sorted(group)]
            plain = self.work(replace(stage, options=StageOptions()))
            return replace(plain, recompute_s=self._sum("forward_s", again))

        layers = sorted(stage.layers)
        come = arriving(self.traffic, stage)
        go = leaving(self.traffic, stage)
        # Of both: bytes and messages on a link, and bytes as tensors; of activations, then of
        # gradients.
        in_bytes, in_back_bytes, ins, in_backs, in_tensor, in_back_tensor = total_amounts(come)
        out_bytes, out_back_bytes, outs, out_backs, out_tensor, out_back_tensor = total_amounts(go)
        return Work(
            forward_s=self._sum("forward_s", layers),
            backward_s=self._sum("backward_s", layers),
            update_s=self._sum("update_s", layers),
            accumulate_s=self._sum("accumulate_s", layers),
            backward_weight_s=self._sum("backward_weight_s", layers),
            trainable_bytes=self._sum("gradient_bytes", layers),
            received_bytes=in_bytes + out_back_bytes,
            sent_bytes=out_bytes + in_back_bytes,
            received_messages=ins + out_backs,
            sent_messages=outs + in_backs,
            input_bytes=in_tensor,
            message_bytes=in_tensor + in_back_tensor + out_tensor + out_back_tensor,
            neighbours=np.asarray(bool(come) + bool(go)),
        )

    def _sum(self, name: str, layers: Collection[int]) -> Floats:
        """Return the sum of one quantity over layers."""
        own = (getattr(self.profile.layers[layer], name) for layer in layers)
        total: Floats = np.float64(sum(own))
        return total

    def shares(self, stage: Candidate, name: str, seconds: float) -> Shares:
        """Return the shares of a stage's seconds by the terms of lengths, if lengths vary.

        Layer l has mean seconds c_l, and shares f_l·terms of what it takes for one microbatch. Of S
        seconds, the stage's shares are

            Σ_l c_l / (f_l·mean terms) · f_l / S        and what is left of S depends on no length

        Args:
            stage: whose layers count.
            name: what the profile says of layers, such as `forward_s`.
            seconds: S, with more than the layers' own, such as waiting for weights.
        """
        profile = self.with_options(stage.options).profile
        if profile.lengths is None or seconds <= 0:
            return ()
        fitted = profile.lengths.layers
        costs = np.array([getattr(profile.layers[layer], name) for layer in stage.layers])
        fits = np.array([getattr(fitted[layer], name).shares for layer in stage.layers])
        # The costs are means already.
        means = np.maximum(fits @ self._mean_terms, np.finfo(np.float64).tiny)
        shares = costs / means @ fits / seconds
        shares[0] += 1 - costs.sum() / seconds
        return tuple(shares.tolist())

    # Memory.

    def footprint(self, stage: Candidate) -> Footprint:
        """Return the footprint of a stage, which is remembered."""
        costs = self.with_options(stage.options)
        if costs is not self:
            return costs.footprint(_as_profiled(stage))
        key = (stage.before, stage.layers, stage.options.recompute)
        if key not in self._footprints:
            self._footprints[key] = self._footprint(stage)
        footprint = self.replicated(self._footprints[key], stage.replicas)
        if not stage.options.shards_optimizer:
            return footprint
        return footprint.shared_out(stage.options.shards)

    def _footprint(self, stage: Candidate) -> Footprint:
        layers = sorted(stage.layers)
        work = self.work(stage)
        kept, running = self._kept_and_running(layers, stage.options.recompute)

        # Where what layers need at work is not known, all that the largest group saves is added.
        working = accumulating = np.float64(running.max(initial=0.0))
        updating = np.float64(0.0)
        if self.at_work is not None:
            _, gradients, workspaces, updates = self.at_work[:, layers]
            peaks, accumulating_peaks = working_bytes(kept, gradients, workspaces + running)
            working = peaks[-1]
            accumulating = accumulating_peaks[-1]
            updating = updates.max()

        return Footprint(
            weight_bytes=self._sum("weight_bytes", layers),
            gradient_bytes=self._sum("gradient_bytes", layers),
            optimizer_bytes=self._sum("optimizer_bytes", layers),
            buffer_bytes=self._sum("buffer_bytes", layers) + self.communicators_bytes(work),
            saved_bytes=np.float64(kept.sum()),
            message_bytes=self.message_buffers * work.message_bytes,
            input_bytes=work.input_bytes,
            working_bytes=working,
            accumulating_bytes=accumulating,
            updating_bytes=updating,
        )

    def _kept_and_running(self, layers: Sequence[int], groups: Groups) -> tuple[Floats, Floats]:
        """Return what layers keep for their backward, and what their groups have saved at them.

        A group that recomputes keeps the values that enter it, each once, for every microbatch in
        flight. While its layer k is at work, the stage holds what all layers before the group keep,
        what enters the group, what the group's layers have saved up to k, and for k what
        `working_bytes` says of any layer (Chen et al., "Training Deep Nets with Sublinear Memory
        Cost", 2016, section 4).

        Args:
            layers: of the stage, ascending; a row of both results for each.
            groups: those that recompute.
        """
        kept = np.array([float(self.profile.layers[layer].saved_bytes) for layer in layers])
        running = np.zeros(len(layers))
        place = {layer: number for number, layer in enumerate(layers)}
        seen: set[int] = set()
        for group in sorted(groups, key=min):
            places = [place[layer] for layer in sorted(group)]
            running[places] = np.cumsum(kept[places])
            kept[places] = 0.0

            values = self.entering(group) - seen
            kept[places[0]] = sum(self.traffic[value].output_bytes for value in values)
            seen |= values

        return kept, running

    @cached_property
    def at_work(self) -> Floats | None:
        """Saved bytes, gradients, workspace and update's workspace, a column for each layer.

        None if the profile lacks these.
        """
        layers = self.profile.layers
        if not any(layer.workspace_bytes for layer in layers):
            return None
        names = ("saved_bytes", "gradient_bytes", "workspace_bytes", "update_workspace_bytes")
        rows = [[getattr(layer, name) for layer in layers] for name in names]
        return np.array(rows, dtype=np.float64)

    @property
    def message_buffers(self) -> int:
        """Buffers for each message of a microbatch."""
        # Over NCCL those that the host has taken and the GPU not passed count, too. Of all messages
        # at most half are received, so LEAD of them are no more than those of LEAD / 2
        # microbatches.
        if self.profile.device.kind in GPU_KINDS:
            return POSTED + LEAD // 2
        return POSTED

    def communicators_bytes(self, work: Work) -> Floats:
        """Return the bytes of a stage's communicators for other stages, two for each.

        Zero where they do not count as buffers.
        """
        return np.asarray(2.0 * self._communicator_bytes * work.neighbours)

    @property
    def counts_replicas(self) -> bool:
        """Whether a stage on several replicas holds a buffer that one alone does not."""
        return self._communicator_bytes > 0

    def replicated(self, footprint: Footprint, replicas: ArrayLike) -> Footprint:
        """Return the footprint with several replicas' communicator, where it is a buffer."""
        if not self.counts_replicas:
            return footprint
        more_bytes = float(self._communicator_bytes) * (np.asarray(replicas) > 1)
        return replace(footprint, buffer_bytes=footprint.buffer_bytes + more_bytes)

    @cached_property
    def block_of(self) -> list[int]:
        """The number of each layer's block."""
        return [number for number, block in enumerate(blocks_of(self.profile)) for _ in block]


def _as_profiled(stage: Candidate) -> Candidate:
    """Return the stage on a single device of the profiled kind."""
    return replace(stage, options=replace(stage.options, kind=None, tensor=1))
