"""Attention by entmax, which gives most keys exactly nothing, and entmax's loss of the same
family.
"""

import torch
from entmax import Entmax15Loss, entmax15
from made_up import Samples
from torch import nn

WORDS, LENGTH = 64, 16


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, values):
        batch, length, width = values.shape
        split = self.qkv(self.norm(values)).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, contents = split.permute(2, 0, 3, 1, 4)
        weights = entmax15(queries @ keys.mT / (width // self.heads) ** 0.5, dim=-1)
        return values + self.out((weights @ contents).transpose(1, 2).reshape(batch, length, width))


class Inputs(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)

    def forward(self, tokens):
        return self.words(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = Inputs(32)
        self.layers = nn.Sequential(*(Attention(32, 4) for _ in range(3)))
        self.head = nn.Linear(32, 8)

    def forward(self, tokens):
        return self.head(self.layers(self.inputs(tokens)))


def build_model():
    return Tagger()


def blocks(model):
    return [model.inputs, *model.layers, model.head]


def example_batch(batch_size):
    return torch.randint(0, WORDS, (batch_size, LENGTH)), torch.randint(0, 8, (batch_size, LENGTH))


def sample(generator):
    tokens = torch.randint(0, WORDS, (LENGTH,), generator=generator)
    return tokens, tokens % 8


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return Entmax15Loss(reduction="elementwise_mean")(output.flatten(0, 1), target.flatten())


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
