"""A residual network with BatchNorm and dropout that recomputes its blocks itself, by
torch.utils.checkpoint.
"""

import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

CLASSES = 10


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convolution, self.norm = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, values):
        return values + self.dropout(self.norm(self.convolution(values)).relu())


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, padding=1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(5))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images):
        values = self.stem(images)
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=False)
        return self.head(values.mean((2, 3)))


def build_model():
    return Network()


def example_batch(batch_size):
    return torch.randn(batch_size, 3, 16, 16), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    return torch.randn(3, 16, 16, generator=generator), torch.randint(
        0, CLASSES, (), generator=generator
    )


def dataset():
    return Samples(sample, 48)


def loss(output, target):
    return cross_entropy(output, target)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
