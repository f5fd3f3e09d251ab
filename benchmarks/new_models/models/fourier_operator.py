"""A Fourier neural operator of neuraloperator: complex weights, and its own relative loss of
functions.
"""

import torch
from made_up import Samples
from neuralop import LpLoss
from neuralop.models import FNO

SIZE = 16


def build_model():
    return FNO(n_modes=(6, 6), hidden_channels=16, in_channels=1, out_channels=1, n_layers=3)


def example_batch(batch_size):
    return torch.randn(batch_size, 1, SIZE, SIZE), torch.randn(batch_size, 1, SIZE, SIZE)


def sample(generator):
    force = torch.randn(1, SIZE, SIZE, generator=generator)
    return force, force.cumsum(1).cumsum(2) / SIZE


def dataset():
    # the loss pins the size of a microbatch, so that the last must not be smaller
    return Samples(sample, 48)


def loss(output, target):
    return LpLoss(d=2, p=2, reduction="mean")(output, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
