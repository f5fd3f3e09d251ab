"""Layouts of all messages that a worker sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from planner.executor.communication.messages import Layout, layout_of
from planner.executor.communication.shared import SharedGradients
from planner.formats.codecs import CODECS, Codec
from planner.model.capture.graph import ValueSpec
from planner.schedule.instructions import (
    Receive,
    ReceiveActivation,
    ReceiveShared,
    Send,
    SendActivation,
    SendShared,
    Unit,
)

SCALE = "loss scale"  # the sender's scale, as a value of a message of gradients; no operation's name has a space


class Layouts:
    """Layouts by message; they follow from the plan and the size of a microbatch, so both ends know them.

    Args:
        transfers: by (source, target) stage, the values that travel to and from this worker's stages.
        shared: by stage, gradients of the weights that it shares with other stages.
        with_scale: whether each message of gradients carries the loss scale that they were computed with.
        codec: of the activations and their gradients.
    """

    def __init__(
        self,
        transfers: Mapping[tuple[int, int], Sequence[ValueSpec]],
        shared: Mapping[int, SharedGradients],
        size_of: Callable[[Unit], int],
        *,
        with_scale: bool,
        codec: Codec = CODECS["none"],
    ) -> None:
        self._transfers = transfers
        self._shared = shared
        self._size_of = size_of
        self._with_scale = with_scale
        self._codec = codec
        self._made: dict[tuple[type[Receive | Send], int, int, int], Layout] = {}

    def of(self, message: Receive | Send) -> Layout:
        """Return the layout of `message`."""
        key = (type(message), message.stage, message.peer_stage, self._size_of(message.unit))
        layout = self._made.get(key)
        if layout is None:
            layout = self._made[key] = self._make(*key)
        return layout

    def _make(self, kind: type[Receive | Send], stage: int, peer: int, samples: int) -> Layout:
        if issubclass(kind, (ReceiveShared, SendShared)):
            return layout_of(self._shared[stage].specs(peer), 1)
        specs = list(self._transfers[min(stage, peer), max(stage, peer)])
        if not issubclass(kind, (ReceiveActivation, SendActivation)):
            specs = [spec.of_gradient for spec in specs if spec.requires_grad]
            if self._with_scale:
                specs.append(ValueSpec(SCALE, torch.float32, requires_grad=False, sizes=(), order=()))
        return layout_of(specs, samples, self._codec)
