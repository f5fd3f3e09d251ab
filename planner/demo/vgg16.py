"""VGG-16 (Simonyan & Zisserman 2015, configuration D) on 32x32 images: the published layers, no
batch normalisation.

The three fully connected layers hold 56% of the weights and take 6% of the arithmetic, so data
parallelism is slow and a pipeline is clearly faster. The data are scikit-learn's handwritten
digits.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.demo.data import Digits

SIZE = 32  # pixels
CLASSES = 10
CHANNELS = (
    64,
    64,
    "pool",
    128,
    128,
    "pool",
    256,
    256,
    256,
    "pool",
    512,
    512,
    512,
    "pool",
    512,
    512,
    512,
    "pool",
)


class VGG16(nn.Module):
    """Images (batch, 3, size, size) -> class scores (batch, classes); size is a multiple of 32."""

    def __init__(self, size: int = SIZE, classes: int = CLASSES) -> None:
        super().__init__()
        features: list[nn.Module] = []
        before = 3
        for width in CHANNELS:
            if isinstance(width, str):
                features.append(nn.MaxPool2d(2))
                continue
            features += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
            before = width

        self.features = nn.Sequential(*features)
        scores = nn.Linear(4096, classes)
        self.classifier = nn.Sequential(
            nn.Linear(512 * (size // 32) ** 2, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            scores,
        )
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                _initialise(module)

        with torch.no_grad():  # at first all classes are about equally likely
            scores.weight *= 0.1

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores, (batch, classes), of images (batch, 3, height, width)."""
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


def _initialise(module: nn.Conv2d | nn.Linear) -> None:
    """Set random weights (He et al. 2015) without their mean, which would hide the images:
    activations are positive.
    """
    nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    with torch.no_grad():
        if module.bias is not None:
            module.bias.zero_()
        module.weight -= module.weight.flatten(1).mean(1).view(-1, *[1] * (module.weight.dim() - 1))
        # Without its mean, a ReLU's output keeps 1 - 1/pi of its second moment.
        module.weight /= (1 - 1 / math.pi) ** 0.5


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return VGG16()


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random images and classes."""
    return (torch.randn(batch_size, 3, SIZE, SIZE),), torch.randint(0, CLASSES, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.0005, momentum=0.9)


def dataset() -> Digits:
    """Return the handwritten digits."""
    return Digits(SIZE)
