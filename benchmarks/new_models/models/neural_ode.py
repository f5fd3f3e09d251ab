"""A neural ODE of torchdiffeq between a convolutional stem and a classifier, with adaptive steps,
so it has blocks.
"""

import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import cross_entropy
from torchdiffeq import odeint

CLASSES = 10


class Derivative(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1, self.conv1 = (
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels + 1, channels, 3, padding=1),
        )
        self.norm2, self.conv2 = (
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels + 1, channels, 3, padding=1),
        )

    def forward(self, time, values):
        times = torch.ones_like(values[:, :1]) * time
        values = self.conv1(torch.cat([times, self.norm1(values).relu()], 1))
        return self.conv2(torch.cat([times, self.norm2(values).relu()], 1))


class ODEBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.derivative = Derivative(channels)
        self.register_buffer("times", torch.tensor([0.0, 1.0]))

    def forward(self, values):
        return odeint(self.derivative, values, self.times, rtol=1e-3, atol=1e-3)[1]


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        ODEBlock(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def blocks(model):
    return list(model)


def example_batch(batch_size):
    return torch.randn(batch_size, 3, 16, 16), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    return torch.randn(3, 16, 16, generator=generator), torch.randint(
        0, CLASSES, (), generator=generator
    )


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output, target)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
