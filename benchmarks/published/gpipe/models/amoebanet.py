"""AmoebaNet-D (L, D): L normal cells in three groups, a reduction cell before each group, D
filters.

The cell is that of Real et al., "Regularized Evolution for Image Classifier Architecture Search"
(AAAI 2019); two more reductions and a convolution precede the first group. The normal cell outputs
its states 0, 3, 4 and 6, as in the authors' TensorFlow code, not 4, 5 and 6 as in the paper: only
so does the number of parameters equal GPipe's Table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

IMAGE = 224
CLASSES = 1000
Operation = Callable[[int, int], nn.Module]  # of channels and stride


def conv(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Module:
    """Return ReLU, convolution and batch norm, which map (batch, inputs, height, width) to (batch,
    outputs, ...).
    """
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Halve(nn.Module):
    """Halves height and width by two 1x1 convolutions, the second on the image shifted by one
    pixel.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.shift = nn.ZeroPad2d((0, 1, 0, 1))
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        result: Tensor = self.norm(
            torch.cat([self.even(x), self.odd(self.shift(x[:, :, 1:, 1:]))], dim=1)
        )
        return result


def identity(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else Halve(channels, channels)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return conv(channels, channels, stride=(stride, stride))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    few = channels // 4
    return nn.Sequential(
        conv(channels, few), conv(few, few, (3, 3), (stride, stride)), conv(few, channels)
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    few = channels // 4
    wide, high = conv(few, few, (1, 7), (1, stride)), conv(few, few, (7, 1), (stride, 1))
    return nn.Sequential(conv(channels, few), wide, high, conv(few, channels))


def max_pool_2x2(_channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def max_pool_3x3(_channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def avg_pool_3x3(_channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


@dataclass(frozen=True)
class Genotype:
    """Pairs of (state, operation) whose results are summed to the next state, and the states that
    are the output.
    """

    operations: Sequence[tuple[int, Operation]]
    out: Sequence[int]


NORMAL = Genotype(
    (
        *((1, conv_1x1), (1, max_pool_3x3)),
        *((1, identity), (0, conv_1x7_7x1)),
        *((0, conv_1x1), (0, conv_1x7_7x1)),
        *((2, max_pool_3x3), (2, identity)),
        *((1, avg_pool_3x3), (5, conv_1x1)),
    ),
    (0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        *((0, max_pool_2x2), (0, max_pool_3x3)),
        *((2, identity), (1, conv_3x3)),
        *((2, conv_1x7_7x1), (2, max_pool_3x3)),
        *((3, identity), (1, max_pool_2x2)),
        *((2, avg_pool_3x3), (3, conv_1x1)),
    ),
    (4, 5, 6),
)


class Cell(nn.Module):
    """Maps the outputs of the two cells before it to the output of the last of them and its own."""

    def __init__(
        self, genotype: Genotype, last: int, last_but_one: int, channels: int, halved: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.take_last = conv(last, channels)
        self.take_last_but_one: nn.Module = nn.Identity()
        if halved:
            self.take_last_but_one = Halve(last_but_one, channels)
        elif last_but_one != channels:
            self.take_last_but_one = conv(last_but_one, channels)
        reducing = genotype is REDUCTION
        self.operations = nn.ModuleList(
            make(channels, 2 if reducing and state < 2 else 1)
            for state, make in genotype.operations
        )

    def forward(self, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        last, last_but_one = outputs
        states = [self.take_last(last), self.take_last_but_one(last_but_one)]
        of = [state for state, _ in self.genotype.operations]
        for pair in range(0, len(of), 2):
            one, other = (self.operations[k](states[of[k]]) for k in (pair, pair + 1))
            states.append(one + other)
        return torch.cat([states[k] for k in self.genotype.out], dim=1), last


class AmoebaNetD(nn.Module):
    """Images (batch, 3, 224, 224) -> scores (batch, classes)."""

    def __init__(self, cells: int, filters: int) -> None:
        super().__init__()
        channels = last = last_but_one = filters // 4
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        group = [NORMAL] * (cells // 3)
        kinds = [REDUCTION, REDUCTION, *group, REDUCTION, *group, REDUCTION, *group]
        self.cells = nn.ModuleList()
        halved = False
        for genotype in kinds:
            channels *= 2 if genotype is REDUCTION else 1
            self.cells.append(Cell(genotype, last, last_but_one, channels, halved))
            last, last_but_one = channels * len(genotype.out), last
            halved = genotype is REDUCTION
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(last, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        last = last_but_one = self.stem(images)
        for cell in self.cells:
            last, last_but_one = cell((last, last_but_one))
        scores: Tensor = self.classifier(self.pool(last).flatten(1))
        return scores


def example(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random images and classes."""
    return (torch.randn(batch_size, 3, IMAGE, IMAGE),), torch.randint(0, CLASSES, (batch_size,))
