"""Layers that sleep for as long as a batch's lengths take, and carry as many bytes; see
`benchmarks.testbed.layers`.

A cost is a sum of terms: 1, the words of the source, those of the target, and the three products of
two of them, each as a part of the longest. One operation of PyTorch's stands for a whole layer, so
that captures see its sizes grow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from benchmarks.testbed.layers import DEVICE, ELEMENT_BYTES, SleepingOptimizer
from planner.model.samplers import BucketSampler

__all__ = ["SleepingOptimizer"]

Terms = tuple[float, ...]


@dataclass(frozen=True)
class Block:
    """One layer: seconds of one microbatch by terms, and elements of a sample of its output by
    powers of words.
    """

    forward_s: Terms
    backward_s: Terms
    update_s: float
    weight_bytes: int
    # for a sample: for 1, for a word of the source, of the target, for products
    elements: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """What a model file of sleeping layers is made of."""

    blocks: tuple[Block, ...]
    least: tuple[int, int]
    most: tuple[int, int]
    samples: tuple[tuple[int, int], ...]  # words of source and target of each
    order: str  # "buckets", "random", or "padded": to the longest


def powers(source: Any, target: Any) -> tuple[Any, ...]:
    """Return what terms count for."""
    return 1, source, target, source * source, source * target, target * target


_RUN: list[Run] = []  # the one that this process trains


def _seconds(terms: Terms, source: Tensor, target: Tensor) -> float:
    most = _RUN[0].most
    parts = powers(source.shape[1] / most[0], target.shape[1] / most[1])
    # A fit may miss a layer that takes next to nothing by more than that.
    return max(0.0, float(sum(term * part for term, part in zip(terms, parts, strict=True))))


def _elements(number: int, source: Tensor, target: Tensor) -> Any:
    counts = zip(
        _RUN[0].blocks[number].elements, powers(source.shape[1], target.shape[1]), strict=True
    )
    return sum(count * part for count, part in counts if count)


@torch.library.custom_op("benchmark_lengths::layer", mutates_args=())
def layer(value: Tensor, weight: Tensor, source: Tensor, target: Tensor, number: int) -> Tensor:
    """Sleep for the forward, and return the output."""
    DEVICE.compute(_seconds(_RUN[0].blocks[number].forward_s, source, target))
    return torch.zeros(len(source), _elements(number, source, target))


@layer.register_fake
def _(value: Tensor, weight: Tensor, source: Tensor, target: Tensor, number: int) -> Tensor:
    return value.new_empty(source.shape[0], _elements(number, source, target))


@torch.library.custom_op("benchmark_lengths::backward", mutates_args=())
def backward(
    value: Tensor, weight: Tensor, source: Tensor, target: Tensor, number: int
) -> tuple[Tensor, Tensor]:
    """Sleep for the backward, and return the gradients of the input and of the weight."""
    DEVICE.compute(_seconds(_RUN[0].blocks[number].backward_s, source, target))
    return torch.zeros_like(value), torch.zeros_like(weight)


@backward.register_fake
def _(
    value: Tensor, weight: Tensor, source: Tensor, target: Tensor, number: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(value), torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.number = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    value, weight, source, target = ctx.saved_tensors
    of_input, of_weight = backward(value, weight, source, target, ctx.number)
    return of_input, of_weight, None, None, None


layer.register_autograd(_gradients, setup_context=_remember)


class Layer(nn.Module):
    """A layer of a profile, with a weight of its bytes."""

    def __init__(self, block: Block, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.zeros(max(1, block.weight_bytes // ELEMENT_BYTES)))
        # for the optimizer, which sees no layers
        self.weight.update_s = block.update_s  # type: ignore[attr-defined]

    def forward(self, value: Tensor, source: Tensor, target: Tensor) -> Tensor:
        made: Tensor = layer(value, self.weight, source, target, self.number)
        return made


class Chain(nn.Module):
    """The layers in sequence."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(block, number) for number, block in enumerate(blocks))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        value = source
        for each in self.layers:
            value = each(value, source, target)
        return value


class Sentences(Dataset[tuple[int, int]]):
    """Pairs of sentences, of which only the lengths matter."""

    def __init__(self, samples: Sequence[tuple[int, int]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self._samples[index]


class EachEpochAlike(Sampler[int]):
    """The order of the first epoch of another sampler in every epoch, so that any whole epoch has
    the same sentences.

    The sampler has no `set_epoch` for this reason.
    """

    def __init__(self, order: Iterable[int]) -> None:
        self._order = list(order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Any:
        return iter(self._order)


class ModelFile:
    """The functions of the model file that `write_model` writes."""

    def __init__(self, folder: Path) -> None:
        self.run = load_run(folder / "run.json")

    def build_model(self) -> Chain:
        _RUN[:] = [self.run]
        return Chain(self.run.blocks)

    def lengths(self) -> dict[str, tuple[int, int]]:
        (source, target), (most_source, most_target) = self.run.least, self.run.most
        return {"source": (source, most_source), "target": (target, most_target)}

    def example_batch(
        self, batch_size: int, source: int, target: int
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        return (torch.zeros(batch_size, source), torch.zeros(batch_size, target)), torch.zeros(
            batch_size
        )

    def collate(self, samples: Sequence[tuple[int, int]]) -> tuple[tuple[Tensor, ...], Tensor]:
        longest = (
            self.run.most if self.run.order == "padded" else map(max, zip(*samples, strict=True))
        )
        return self.example_batch(len(samples), *longest)

    def sampler(self, microbatch_size: int, microbatches: int, seed: int) -> Sampler[int]:
        lengths = [sum(pair) for pair in self.run.samples]
        if self.run.order == "buckets":
            return EachEpochAlike(BucketSampler(lengths, microbatch_size, microbatches, seed=seed))
        return EachEpochAlike(
            torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
        )


MODEL_FILE = '''\
"""Layers that sleep; written by benchmarks.testbed.lengths."""

from pathlib import Path

from benchmarks.testbed.lengths import layers

FILE = layers.ModelFile(Path(__file__).parent)
build_model, collate, sampler = FILE.build_model, FILE.collate, FILE.sampler


def example_batch(batch_size, source=FILE.run.most[0], target=FILE.run.most[1]):
    return FILE.example_batch(batch_size, source, target)


def dataset():
    return layers.Sentences(FILE.run.samples)


def loss(output, target):
    return output[0, 0]


def optimizer(parameters):
    return layers.SleepingOptimizer(parameters)
'''
VARYING = "\n\nlengths = FILE.lengths\n"


def write_model(run: Run, folder: Path) -> Path:
    """Write the model file, of lengths that vary unless batches are padded to the longest; return
    its path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(asdict(run)), encoding="utf-8")
    path = folder / "model.py"
    path.write_text(MODEL_FILE + (VARYING if run.order != "padded" else ""), encoding="utf-8")
    return path


def load_run(path: Path) -> Run:
    """Return what `write_model` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    blocks: list[Any] = content["blocks"]
    made = (
        Block(
            tuple(block["forward_s"]),
            tuple(block["backward_s"]),
            block["update_s"],
            block["weight_bytes"],
            tuple(block["elements"]),
        )
        for block in blocks
    )
    samples = tuple((source, target) for source, target in content["samples"])
    return Run(
        tuple(made), tuple(content["least"]), tuple(content["most"]), samples, content["order"]
    )
