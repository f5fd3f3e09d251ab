"""Mamba of mamba.py: its parallel scan is an autograd function of its own, so it has blocks."""

import torch
from made_up import Samples
from mambapy.mamba import Mamba, MambaConfig
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, LENGTH = 96, 16


def build_model():
    mamba = Mamba(MambaConfig(d_model=24, n_layers=3, d_state=8))
    return nn.Sequential(nn.Embedding(WORDS, 24), mamba, nn.LayerNorm(24), nn.Linear(24, WORDS))


def blocks(model):
    words, mamba, norm, head = model
    return [words, *mamba.layers, norm, head]


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def sample(generator):
    tokens = torch.randint(1, WORDS, (LENGTH + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
