"""Emulate devices by layers that sleep for their time, and have tensors and weights of their bytes.

A device has a clock. A layer starts when the one before it on the same device has ended, and the
device sleeps until the layer's time is over. Python's time between layers and the delay of a late
sleep thus shorten the next sleep, as on a GPU whose kernels are launched ahead. After a wait longer
than `SLACK_S` the clock starts again.

A layer's backward has a part for its input and one for its weight, because zero-bubble schedules
run them apart.

Nothing is computed: outputs and gradients are buffers, allocated once. Messages and all-reduces are
real.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.formats.profile import UNKNOWN_WEIGHT_SHARE

SLACK_S = 0.005
ELEMENT_BYTES = 4
LOSS = "loss"  # layer after the last block, which takes no time


@dataclass(frozen=True)
class Block:
    """One layer: emulated seconds and bytes for one microbatch."""

    forward_s: float
    backward_s: float
    update_s: float
    weight_bytes: int
    output_bytes: int


class Device:
    """Clock of this process's device."""

    def __init__(self) -> None:
        # An array, because a number that each call of the model changes is refused: it may be part
        # of what is computed.
        self._busy_until_s = array("d", [0.0])

    def compute(self, seconds: float) -> None:
        """Be busy for `seconds` after the previous work."""
        if not dist.is_initialized():
            return  # while models are built and captured, layers do not sleep
        now = time.perf_counter()
        (before_s,) = self._busy_until_s
        start = before_s if now - before_s < SLACK_S else now
        self._busy_until_s[0] = start + seconds
        if start + seconds > now:
            time.sleep(start + seconds - now)


DEVICE = Device()


class EmulatedLayer(nn.Module):
    """A layer of a profile, which maps a tensor of shape (samples, bytes of a sample / 4) to
    another one.
    """

    def __init__(self, block: Block, microbatch_size: int) -> None:
        super().__init__()
        self.block = block
        self.weight = nn.Parameter(torch.zeros(max(1, block.weight_bytes // ELEMENT_BYTES)))
        # For the optimizer, which sees no layers.
        self.weight.update_s = block.update_s  # type: ignore[attr-defined]
        self.weight_gradient = torch.zeros_like(self.weight)
        self.per_sample = max(1, round(block.output_bytes / ELEMENT_BYTES / microbatch_size))
        self._buffers_of: dict[tuple[int, ...], Tensor] = {}

    def forward(self, value: Tensor) -> Tensor:
        """Sleep, and return the output."""
        # Made before the rest: autograd runs what was made last first, so the weight's gradient
        # comes at the end.
        weight = _OfWeight.apply(  # type: ignore[no-untyped-call]
            self.weight, self, value.requires_grad
        )
        output = _OfInput.apply(value, self)  # type: ignore[no-untyped-call]
        result: Tensor = _Joined.apply(  # type: ignore[no-untyped-call]
            output, weight, value.detach(), self
        )
        return result

    def buffer(self, *shape: int) -> Tensor:
        """Return a tensor of this shape, the same one each time."""
        if shape not in self._buffers_of:
            self._buffers_of[shape] = torch.zeros(shape)
        return self._buffers_of[shape].detach()


class _OfInput(torch.autograd.Function):
    """The forward, and the part of the backward that earlier layers wait for."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.layer, ctx.shape = layer, tuple(value.shape)
        DEVICE.compute(layer.block.forward_s)
        return layer.buffer(len(value), layer.per_sample)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, None]:
        layer: EmulatedLayer = ctx.layer
        DEVICE.compute((1 - UNKNOWN_WEIGHT_SHARE) * layer.block.backward_s)
        return layer.buffer(*ctx.shape), None


class _OfWeight(torch.autograd.Function):
    """The part of the backward for the weight: all of it, where the input has no gradient."""

    @staticmethod
    def forward(ctx: Any, _weight: Tensor, layer: EmulatedLayer, after_input: bool) -> Tensor:
        ctx.layer, ctx.share = layer, UNKNOWN_WEIGHT_SHARE if after_input else 1.0
        return torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, None, None]:
        layer: EmulatedLayer = ctx.layer
        DEVICE.compute(ctx.share * layer.block.backward_s)
        return layer.weight_gradient, None, None


class _Joined(torch.autograd.Function):
    """Where both parts meet: a backward that is split begins here twice, and so this takes
    no time.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, _weight: Tensor, value: Tensor, layer: EmulatedLayer
    ) -> Tensor:
        ctx.save_for_backward(value)
        return layer.buffer(*output.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # as a real layer does; where it recomputes, this is when its forward runs again
        _ = ctx.saved_tensors
        return gradient, torch.zeros(1), None, None


class SleepingOptimizer(torch.optim.Optimizer):
    """Sleeps for the update time of the profile, and leaves the weights unchanged.

    Where replicas divide it, each sleeps for its share of the elements.
    """

    elementwise = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        whole_s = sum(p.update_s for group in self.param_groups for p in group["params"])
        self._seconds_per_element = whole_s / max(1, self._elements())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Sleep."""
        DEVICE.compute(self._seconds_per_element * self._elements())

    def _elements(self) -> int:
        return sum(p.numel() for group in self.param_groups for p in group["params"])


def build_model(blocks: Iterable[Block], microbatch_size: int) -> nn.Sequential:
    """Return the layers in sequence."""
    return nn.Sequential(*(EmulatedLayer(block, microbatch_size) for block in blocks))


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the smallest possible batch, since data is not sent."""
    return (torch.zeros(batch_size, 1),), torch.zeros(batch_size)


def loss(output: Tensor, _target: Tensor) -> Tensor:
    """Return a loss of one number of the output."""
    return output[0, 0]


MODEL_FILE = '''\
"""Layers that sleep; written by benchmarks.testbed."""

from pathlib import Path

from benchmarks.testbed import layers

BLOCKS, MICROBATCH_SIZE = layers.load_blocks(Path(__file__).with_name("blocks.json"))


def build_model():
    return layers.build_model(BLOCKS, MICROBATCH_SIZE)


def blocks(model):
    return list(model)


def example_batch(batch_size):
    return layers.example_batch(batch_size)


def loss(output, target):
    return layers.loss(output, target)


def optimizer(parameters):
    return layers.SleepingOptimizer(parameters)
'''


def write_model(blocks: list[Block], microbatch_size: int, folder: Path) -> Path:
    """Write the model file and its layers' costs; return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"microbatch_size": microbatch_size, "blocks": [asdict(block) for block in blocks]}
    (folder / "blocks.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    path = folder / "model.py"
    path.write_text(MODEL_FILE, encoding="utf-8")
    return path


def load_blocks(path: Path) -> tuple[list[Block], int]:
    """Return the costs that `write_model` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Block(**block) for block in content["blocks"]], content["microbatch_size"]
