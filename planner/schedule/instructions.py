"""Instructions: what a worker does, as data.

A *unit* of work is one microbatch of one minibatch. An instruction names its unit and stage; a
message also names the stage and the rank at its other end. Nothing else is needed to run or to draw
a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

# from which on GPipe (Huang et al. 2019, section 2.3) calls its bubble negligible
MICROBATCHES_PER_GPU = 4
CHUNKS = 2  # of the model on each GPU, where a schedule interleaves them
LATE_UPDATES = 4  # gradients that are more updates late than this are worth a warning
MOMENTUM_UPDATES = 3  # from so many on, large momentum has made losses larger by 10% and more
POSTED = 2  # receives per channel that are open at once: one message in use and one on its way
# Messages that a host may have taken and its GPU not passed yet. Until then their memory cannot be
# given out again: without a bound the host's lead would decide how much memory messages take.
LEAD = 4


# a tuple hashes and compares in C: every instruction looks up several things by its unit
class Unit(NamedTuple):
    """Microbatch `microbatch` of minibatch `minibatch`, both counted from 0."""

    minibatch: int
    microbatch: int = 0


class Units(Sequence[Unit]):
    """Some microbatches of one minibatch, made when they are asked for: there may be a million."""

    def __init__(self, minibatch: int, microbatches: range) -> None:
        self._minibatch = minibatch
        self._microbatches = microbatches

    def __len__(self) -> int:
        return len(self._microbatches)

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> Units: ...
    def __getitem__(self, index: int | slice) -> Unit | Units:
        if isinstance(index, slice):
            return Units(self._minibatch, self._microbatches[index])
        return Unit(self._minibatch, self._microbatches[index])


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage's layers on `unit`, and stash the version of the weights that it uses."""

    stage: int
    unit: Unit
    version: int | None = None  # the updates that it has had; None for the newest


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of `unit`, with the weight version its forward used."""

    stage: int
    unit: Unit
    # gradients are complete as it proceeds, so their all-reduce may begin
    last_of_round: bool = True


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Run the part of the backward of `unit` that earlier stages wait for: the gradients of the
    stage's inputs.
    """

    stage: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Run the rest of the backward of `unit`: the gradients of the weights."""

    stage: int
    unit: Unit
    last_of_round: bool = True


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of `unit` between `stage`, on this worker, and `peer_stage` on `peer_rank`; sends
    never wait.
    """

    stage: int
    unit: Unit
    peer_stage: int
    peer_rank: int


class ReceiveActivation(_Message):
    """Receive the activations of a unit from an earlier stage."""

    __slots__ = ()


class SendActivation(_Message):
    """Send the activations of a unit to a later stage."""

    __slots__ = ()


class ReceiveGradient(_Message):
    """Receive the gradients of a unit from a later stage."""

    __slots__ = ()


class SendGradient(_Message):
    """Send the gradients of a unit to an earlier stage."""

    __slots__ = ()


class SendShared(_Message):
    """Send the stage's gradients, of round `unit.minibatch`, of the weights that it shares with
    `peer_stage`.
    """

    __slots__ = ()


class ReceiveShared(_Message):
    """Receive the gradients of weights that another stage shares."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Wait until the stage's replicas have summed the gradients of round `round`, then divide by
    `divisor`.

    Where a round is of one minibatch, there is none; one of several on a single replica has only
    the division.
    """

    stage: int
    round: int
    divisor: int


@dataclass(frozen=True, slots=True)
class AddShared:
    """Sum the gradients of round `round` of all stages that share weights: the next update steps
    with the sums.
    """

    stage: int
    round: int


@dataclass(frozen=True, slots=True)
class Update:
    """Step the optimizer with the gradients of round `round`: this makes weight version `round` +
    1.
    """

    stage: int
    round: int
    kept: tuple[int, ...] = ()  # the older versions that forwards yet to come use


Receive = ReceiveActivation | ReceiveGradient | ReceiveShared
Send = SendActivation | SendGradient | SendShared
Message = Receive | Send
Compute = Forward | Backward | BackwardInput | BackwardWeight | Update
Instruction = Message | Compute | AllReduce | AddShared

_RECEIVES: dict[type[Send], type[Receive]] = {
    SendActivation: ReceiveActivation,
    SendGradient: ReceiveGradient,
    SendShared: ReceiveShared,
}


def matching_receive(send: Send, sender_rank: int) -> Receive:
    """Return the receive of a message that a rank sends."""
    return _RECEIVES[type(send)](send.peer_stage, send.unit, send.stage, sender_rank)
