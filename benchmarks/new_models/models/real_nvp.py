"""RealNVP of normflows: affine couplings and ActNorm; the loss is the mean negative
log-likelihood.
"""

import normflows as nf
import torch
from made_up import Samples
from torch import nn

FEATURES = 6


class Likelihood(nn.Module):
    def __init__(self):
        super().__init__()
        mask = torch.tensor([1.0, 0.0] * (FEATURES // 2))
        flows = []
        for layer in range(4):
            scale, shift = (
                nf.nets.MLP([FEATURES, 32, 32, FEATURES], init_zeros=True) for _ in range(2)
            )
            flows += [nf.flows.MaskedAffineFlow(mask if layer % 2 else 1 - mask, shift, scale)]
            flows += [nf.flows.ActNorm(FEATURES)]
        self.flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(FEATURES), flows)

    def forward(self, values):
        return self.flow.forward_kld(values)


def build_model():
    model = Likelihood()
    with torch.no_grad():
        # ActNorm sets its weights by the first batch it sees
        model(torch.randn(64, FEATURES).cumsum(1))
    return model


class Step(nn.Module):
    def __init__(self, flow, *, first):
        super().__init__()
        self.flow, self.first = flow, first

    def forward(self, state):
        values, total = (state, torch.zeros_like(state[:, 0])) if self.first else state
        values, logarithm = self.flow.inverse(values)
        return values, total + logarithm


class Base(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.distribution = model.flow.q0

    def forward(self, state):
        values, total = state
        return -(total + self.distribution.log_prob(values)).mean()


def blocks(model):
    flows = reversed(model.flow.flows)
    return [*(Step(flow, first=index == 0) for index, flow in enumerate(flows)), Base(model)]


def example_batch(batch_size):
    return torch.randn(batch_size, FEATURES), None


def sample(generator):
    return torch.randn(FEATURES, generator=generator).cumsum(0), None


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return output


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-5)
