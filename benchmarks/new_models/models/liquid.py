"""Closed-form continuous-time networks of ncps, the second wired as a worm's nerves."""

import torch
from made_up import Samples
from ncps.torch import CfC
from ncps.wirings import AutoNCP
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR

FEATURES, LENGTH = 5, 10


class Liquid(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = CfC(FEATURES, 24, batch_first=True)
        self.second = CfC(24, AutoNCP(20, 4, seed=22222), batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, series):
        hidden, _ = self.first(series)
        outputs, _ = self.second(hidden)
        return self.head(outputs)


def build_model():
    return Liquid()


def example_batch(batch_size):
    return torch.randn(batch_size, LENGTH, FEATURES), torch.randn(batch_size, LENGTH, 1)


def sample(generator):
    series = torch.randn(LENGTH, FEATURES, generator=generator)
    return series, series.cumsum(0).mean(1, keepdim=True)


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return mse_loss(output, target)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=5e-3)


def scheduler(optimizer):
    return ExponentialLR(optimizer, gamma=0.95)
