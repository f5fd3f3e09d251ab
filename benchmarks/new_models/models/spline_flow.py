"""A neural spline flow of nflows: rational quadratic splines whose bins are searched, and random
permutations.
"""

import torch
from made_up import Samples
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms.autoregressive import MaskedPiecewiseRationalQuadraticAutoregressiveTransform
from nflows.transforms.base import CompositeTransform
from nflows.transforms.permutations import ReversePermutation
from torch import nn

FEATURES = 5


class Likelihood(nn.Module):
    def __init__(self):
        super().__init__()
        layers = []
        for _ in range(3):
            layers.append(ReversePermutation(features=FEATURES))
            layers.append(
                MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
                    features=FEATURES,
                    hidden_features=32,
                    num_bins=6,
                    tails="linear",
                    tail_bound=3.0,
                )
            )
        self.flow = Flow(CompositeTransform(layers), StandardNormal([FEATURES]))

    def forward(self, values):
        return self.flow.log_prob(inputs=values)


def build_model():
    return Likelihood()


class Step(nn.Module):
    def __init__(self, transform, *, first):
        super().__init__()
        self.transform, self.first = transform, first

    def forward(self, state):
        values, total = (state, torch.zeros_like(state[:, 0])) if self.first else state
        values, logarithm = self.transform(values)
        return values, total + logarithm


class Base(nn.Module):
    def __init__(self, flow):
        super().__init__()
        self.distribution = flow._distribution

    def forward(self, state):
        values, total = state
        return self.distribution.log_prob(values) + total


def blocks(model):
    transforms = model.flow._transform._transforms
    return [
        *(Step(each, first=index == 0) for index, each in enumerate(transforms)),
        Base(model.flow),
    ]


def example_batch(batch_size):
    return torch.randn(batch_size, FEATURES), None


def sample(generator):
    return torch.randn(FEATURES, generator=generator) * 1.5, None


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return -output.mean()


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
