"""Work and memory of candidate stages: records of numpy arrays, so that one call answers for one or
for thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.formats.files import replace

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

IMPOSSIBLE = 2**40  # stands for the replicas of a stage that is too slow with any number of them


@dataclass(frozen=True)
class Work:
    """Work of candidate stages for one microbatch; all fields broadcast against each other."""

    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    trainable_bytes: Floats
    received_bytes: Floats
    sent_bytes: Floats
    received_messages: Floats
    sent_messages: Floats
    # As tensors, while links may code them: activations received, and all that is received and
    # sent.
    input_bytes: Floats = field(default_factory=lambda: np.asarray(0.0))
    message_bytes: Floats = field(default_factory=lambda: np.asarray(0.0))
    recompute_s: Floats = field(default_factory=lambda: np.asarray(0.0))
    # Gradient accumulation, per backward: for every microbatch of a minibatch but the first.
    accumulate_s: Floats = field(default_factory=lambda: np.asarray(0.0))
    # Of the backward, for the gradients of weights, which some schedules compute later.
    backward_weight_s: Floats = field(default_factory=lambda: np.asarray(0.0))
    # Whether the replicas divide the update, which is that of all of the stage's weights here.
    sharded: NDArray[np.bool_] = field(default_factory=lambda: np.asarray(False))
    # 1 for earlier stages, and 1 for later ones
    neighbours: Integers = field(default_factory=lambda: np.asarray(0))

    @property
    def compute_s(self) -> Floats:
        return self.forward_s + self.recompute_s + self.backward_s + self.update_s

    def last_backward_s(self, share: ArrayLike) -> Floats:
        """Return the seconds of a replica's last backward in a minibatch, of which it runs `share`
        microbatches.
        """
        return np.asarray(self.backward_s + np.where(np.asarray(share) > 1, self.accumulate_s, 0.0))

    def rows(self, rows: Integers | slice) -> Work:
        """Return the work of some of the stages."""
        return type(self)(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    def shared_out(self, sharded: ArrayLike = True) -> Work:
        """Return the work of the same stages if their replicas divide the optimizer's state and its
        update.
        """
        return replace(self, sharded=np.asarray(sharded))

    def recomputed(self) -> Work:
        """Return the work of the same stages if they run their forward again before each
        backward.
        """
        return replace(self, recompute_s=self.forward_s)

    def without_transfers(self) -> Work:
        """Return the work as if no values passed between stages."""
        nothing = np.zeros_like(self.received_bytes)
        return replace(
            self,
            received_bytes=nothing,
            sent_bytes=nothing,
            received_messages=nothing,
            sent_messages=nothing,
        )


@dataclass(frozen=True)
class Footprint:
    """Bytes that one replica of a candidate stage holds, per microbatch in flight and per version
    of the weights.
    """

    weight_bytes: Floats
    gradient_bytes: Floats
    optimizer_bytes: Floats
    buffer_bytes: Floats
    saved_bytes: Floats
    message_bytes: Floats  # buffers of messages, both ways
    # activations received for one microbatch
    input_bytes: Floats = field(default_factory=lambda: np.asarray(0.0))
    # Needed by the running microbatch beyond its saved activations and all gradients; negative
    # where these never exist all at once. See `working_bytes`.
    working_bytes: Floats = field(default_factory=lambda: np.asarray(0.0))
    # the same under gradient accumulation
    accumulating_bytes: Floats = field(default_factory=lambda: np.asarray(0.0))
    # workspace of the optimizer's step
    updating_bytes: Floats = field(default_factory=lambda: np.asarray(0.0))

    @property
    def running_bytes(self) -> Floats:
        """Bytes at the peak beyond all gradients and what is saved, of a microbatch or of the
        optimizer's step.
        """
        # During the step the microbatch is gone, and its saved activations with it.
        return np.maximum(self.working_bytes, self.updating_bytes - self.saved_bytes)

    def shared_out(self, replicas: ArrayLike) -> Footprint:
        """Return the footprint of the same stages if so many replicas divide the optimizer's state;
        rounded up.
        """
        return replace(self, optimizer_bytes=np.ceil(self.optimizer_bytes / np.asarray(replicas)))

    def recomputed(self) -> Footprint:
        """Return the footprint of the same stages if each recomputes as a whole: it saves its input
        alone.
        """
        return replace(
            self,
            saved_bytes=self.input_bytes,
            working_bytes=self.saved_bytes + self.working_bytes,
            accumulating_bytes=self.saved_bytes + self.accumulating_bytes,
        )

    def least(self) -> Footprint:
        """Return a footprint that no choice of layers that recompute is below."""
        nothing = np.zeros_like(self.saved_bytes)
        return replace(
            self,
            saved_bytes=nothing,
            working_bytes=nothing - self.gradient_bytes,
            accumulating_bytes=nothing,
        )

    def divided(self, microbatches: int) -> Footprint:
        """Return the footprint with so many microbatches per minibatch: several accumulate into all
        gradients.
        """
        if microbatches > 1:
            return replace(self, working_bytes=self.accumulating_bytes)
        return self

    def total_bytes(self, in_flight: ArrayLike, versions: ArrayLike) -> Floats:
        """Compute the peak bytes with so many microbatches in flight and versions of the
        weights.
        """
        fixed = self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes + self.message_bytes
        fixed = fixed + self.running_bytes
        return np.asarray(
            fixed
            + self.weight_bytes * np.asarray(versions)
            + self.saved_bytes * np.asarray(in_flight)
        )

    def most_in_flight(self, memory_bytes: float, stashing: bool, versions: int = 1) -> Integers:
        """Return the largest number of microbatches in flight that fits `memory_bytes`; 0 if not
        even one does.

        With weight stashing each of them has its own version of the weights; without it the stage
        holds `versions`.
        """
        per_flight = self.saved_bytes + (self.weight_bytes if stashing else 0.0)
        room = memory_bytes - (self.total_bytes(1, versions) - per_flight)
        # Where a microbatch in flight takes no memory, their number is unlimited if the rest fits.
        many = np.where(room >= 0, float(IMPOSSIBLE), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            fit = np.where(per_flight > 0, np.floor(np.maximum(room, 0.0) / per_flight), many)
        return np.minimum(fit, IMPOSSIBLE).astype(np.int64)


Record = TypeVar("Record", Work, Footprint)


def stacked(works: Sequence[Work]) -> Work:
    """Return the work of single stages as one record, with a row for each."""
    return Work(
        **{
            each.name: np.array([getattr(work, each.name) for work in works])
            for each in fields(Work)
        }
    )


def joined(records: Sequence[Record], counts: Sequence[int]) -> Record:
    """Return the work, or the footprints, of several lots of so many stages as one record."""
    columns = {}
    for name in (each.name for each in fields(records[0])):
        values = [np.asarray(getattr(record, name)) for record in records]
        lots = zip(values, counts, strict=True)
        columns[name] = np.concatenate(
            [value if value.ndim else np.full(count, value) for value, count in lots]
        )
    return type(records[0])(**columns)


def working_bytes(
    saved_bytes: Floats, gradient_bytes: Floats, workspace_bytes: Floats
) -> tuple[Floats, Floats]:
    """Compute `Footprint.working_bytes` and `accumulating_bytes` of stages of the first 1, 2, ... n
    layers.

    While layer k of n is at work, a stage holds

        saved_1 + ... + saved_k  +  workspace_k  +  gradient_k + ... + gradient_n

    With several microbatches per minibatch all gradients exist, and those of layer k twice until
    they are accumulated.
    """
    saved = np.cumsum(saved_bytes)
    at_work = saved + workspace_bytes
    missing = np.cumsum(gradient_bytes) - gradient_bytes
    whole = np.maximum.accumulate(at_work - missing)
    accumulating = np.maximum.accumulate(at_work + gradient_bytes)
    return whole - saved, accumulating - saved


def fewest_to_hold(in_flight: ArrayLike, gpus_after: ArrayLike) -> Integers:
    """Return the fewest replicas of a 1f1b stage, each with room for `in_flight` microbatches; or
    `IMPOSSIBLE`.
    """
    # 1 + ceil(g / r) <= d <=> r >= ceil(g / (d - 1)): the replicas share the microbatches in
    # flight.
    others = np.asarray(in_flight) - 1
    after = np.asarray(gpus_after, dtype=np.int64)
    shared = np.maximum(-(-after // np.maximum(others, 1)), 1)
    return np.where((others >= 1) | ((others == 0) & (after == 0)), shared, IMPOSSIBLE)
