"""Inception-v3 (Szegedy et al. 2016) for ImageNet, with its auxiliary classifier and torchvision's
layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 299  # pixels
CLASSES = 1000
AUXILIARY = 0.4  # weight of the auxiliary classifier's loss (section 4; torchvision's value)

Pair = tuple[int, int]


class Conv(nn.Module):
    """Convolution, batch normalisation and ReLU."""

    def __init__(
        self,
        before: int,
        width: int,
        kernel: int | Pair,
        *,
        stride: int = 1,
        padding: int | Pair = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, width, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(width, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionA(nn.Module):
    """Figure 5 of the paper: parallel branches of 1x1, 5x5, double 3x3 and pooling."""

    def __init__(self, before: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(before, 64, 1)
        self.branch5x5_1 = Conv(before, 48, 1)
        self.branch5x5_2 = Conv(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = Conv(before, 64, 1)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, padding=1)
        self.branch_pool = Conv(before, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        pooled = self.branch_pool(F.avg_pool2d(x, 3, 1, 1))
        return torch.cat(
            [self.branch1x1(x), self.branch5x5_2(self.branch5x5_1(x)), double, pooled], 1
        )


class InceptionB(nn.Module):
    """Reduction from 35x35 to 17x17."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(before, 384, 3, stride=2)
        self.branch3x3dbl_1 = Conv(before, 64, 1)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, 2)], 1)


class InceptionC(nn.Module):
    """Figure 6: 7x7 convolutions as 1x7 and 7x1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        across, down = (1, 7), (7, 1)
        pad_across, pad_down = (0, 3), (3, 0)
        self.branch1x1 = Conv(768, 192, 1)
        self.branch7x7_1 = Conv(768, width, 1)
        self.branch7x7_2 = Conv(width, width, across, padding=pad_across)
        self.branch7x7_3 = Conv(width, 192, down, padding=pad_down)
        self.branch7x7dbl_1 = Conv(768, width, 1)
        self.branch7x7dbl_2 = Conv(width, width, down, padding=pad_down)
        self.branch7x7dbl_3 = Conv(width, width, across, padding=pad_across)
        self.branch7x7dbl_4 = Conv(width, width, down, padding=pad_down)
        self.branch7x7dbl_5 = Conv(width, 192, across, padding=pad_across)
        self.branch_pool = Conv(768, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        pooled = self.branch_pool(F.avg_pool2d(x, 3, 1, 1))
        return torch.cat([self.branch1x1(x), single, double, pooled], 1)


class InceptionD(nn.Module):
    """Reduction from 17x17 to 8x8."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3_1 = Conv(768, 192, 1)
        self.branch3x3_2 = Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Conv(768, 192, 1)
        self.branch7x7x3_2 = Conv(192, 192, (1, 7), padding=(0, 3))
        self.branch7x7x3_3 = Conv(192, 192, (7, 1), padding=(3, 0))
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), seven, F.max_pool2d(x, 3, 2)], 1)


class InceptionE(nn.Module):
    """Figure 7: two of the branches end in parallel 1x3 and 3x1 convolutions."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(before, 320, 1)
        self.branch3x3_1 = Conv(before, 384, 1)
        self.branch3x3_2a = Conv(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3_2b = Conv(384, 384, (3, 1), padding=(1, 0))
        self.branch3x3dbl_1 = Conv(before, 448, 1)
        self.branch3x3dbl_2 = Conv(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = Conv(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = Conv(384, 384, (3, 1), padding=(1, 0))
        self.branch_pool = Conv(before, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = self.branch_pool(F.avg_pool2d(x, 3, 1, 1))
        wide = [self.branch3x3_2a(single), self.branch3x3_2b(single)]
        wide += [self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double)]
        return torch.cat([self.branch1x1(x), *wide, pooled], 1)


class Auxiliary(nn.Module):
    """A second classifier on the 17x17 grid (figure 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = Conv(768, 128, 1)
        self.conv1 = Conv(128, 768, 5)
        self.fc = nn.Linear(768, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.conv0(F.avg_pool2d(x, 5, 3)))
        scores: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


class InceptionV3(nn.Module):
    """Images (batch, 3, 299, 299) -> class scores (batch, 1000), of the main and the auxiliary
    classifier.

    Args:
        blocks: number of InceptionC blocks, four as published.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Conv(3, 32, 3, stride=2),
            Conv(32, 32, 3),
            Conv(32, 64, 3, padding=1),
            nn.MaxPool2d(3, 2),
            Conv(64, 80, 1),
            Conv(80, 192, 3),
            nn.MaxPool2d(3, 2),
        )
        self.mixed_5 = nn.Sequential(InceptionA(192, 32), InceptionA(256, 64), InceptionA(288, 64))
        self.mixed_6a = InceptionB(288)
        self.mixed_6 = nn.Sequential(
            *(InceptionC(width) for width in (128, 160, 160, 192)[:blocks])
        )
        self.auxiliary = Auxiliary()
        self.mixed_7a = InceptionD()
        self.mixed_7 = nn.Sequential(InceptionE(1280), InceptionE(2048))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(2048, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.mixed_6(self.mixed_6a(self.mixed_5(self.stem(images))))
        auxiliary = self.auxiliary(x)
        x = self.mixed_7(self.mixed_7a(x))
        x = self.dropout(F.adaptive_avg_pool2d(x, 1)).flatten(1)
        return self.fc(x), auxiliary


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return InceptionV3(4)


def build_tiny() -> nn.Module:
    """Return a model with one block of the third kind instead of four, for experiments."""
    return InceptionV3(1)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random images and classes."""
    return (torch.randn(batch_size, 3, SIZE, SIZE),), torch.randint(0, CLASSES, (batch_size,))


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Return the weighted sum of both classifiers' mean cross-entropy."""
    scores, auxiliary = output
    return F.cross_entropy(scores, target) + AUXILIARY * F.cross_entropy(auxiliary, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)
