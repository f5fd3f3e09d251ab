"""A Kolmogorov-Arnold network of pykan: a spline on each edge, and symbolic functions beside it."""

import torch
from kan import KAN
from made_up import Samples
from torch.nn.functional import mse_loss


def build_model():
    return KAN(
        width=[4, 6, 6, 1], grid=5, k=3, seed=int(torch.randint(0, 1000, ())), auto_save=False
    )


def example_batch(batch_size):
    return torch.rand(batch_size, 4) * 2 - 1, torch.randn(batch_size, 1)


def sample(generator):
    values = torch.rand(4, generator=generator) * 2 - 1
    return values, (torch.sin(3 * values[:1]) + values[1:2] * values[2:3]).exp()


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return mse_loss(output, target)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
