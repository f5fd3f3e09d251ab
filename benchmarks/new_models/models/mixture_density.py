"""A mixture density network on a set of points: Student-t's of torch.distributions, mixed."""

import torch
from made_up import Samples
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, StudentT

POINTS, PARTS = 10, 4


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.whole = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 3 * PARTS))

    def forward(self, points):
        each = self.point(points)
        weights, places, scales = self.whole(torch.cat([each.mean(1), each.amax(1)], 1)).chunk(3, 1)
        return weights, places, scales


def build_model():
    return Mixture()


def example_batch(batch_size):
    return torch.randn(batch_size, POINTS, 3), torch.randn(batch_size)


def sample(generator):
    points = torch.randn(POINTS, 3, generator=generator)
    return points, points.norm(dim=1).max()


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    weights, places, scales = output
    parts = StudentT(4.0, places, nn.functional.softplus(scales) + 1e-3, validate_args=False)
    mixture = MixtureSameFamily(
        Categorical(logits=weights, validate_args=False), parts, validate_args=False
    )
    return -mixture.log_prob(target).mean()


def optimizer(parameters):
    return torch.optim.NAdam(parameters, lr=1e-3)
