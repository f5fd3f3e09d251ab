"""Residual vector quantization: codebooks are running means of what they encode, changed in every
forward.

A codebook asks whether it was begun, which decides by a value, so the file names the blocks.
"""

import torch
from made_up import Samples
from schedules import by_factor, cosine_after_warm_up
from torch import nn
from torch.nn.functional import mse_loss
from vector_quantize_pytorch import ResidualVQ

SAMPLES, WIDTH = 64, 16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, WIDTH, 5, 2, 2)
        self.second = nn.Conv1d(WIDTH, WIDTH, 5, 2, 2)

    def forward(self, sound):
        return self.second(nn.functional.elu(self.first(sound))).transpose(1, 2)


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.codebooks = ResidualVQ(dim=WIDTH, num_quantizers=3, codebook_size=32, decay=0.9)

    def forward(self, hidden):
        codes, _, commitment = self.codebooks(hidden)
        return codes.transpose(1, 2), commitment.sum()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ConvTranspose1d(WIDTH, WIDTH, 4, 2, 1)
        self.second = nn.ConvTranspose1d(WIDTH, 1, 4, 2, 1)

    def forward(self, values):
        codes, commitment = values
        return self.second(nn.functional.elu(self.first(codes))), commitment


def build_model():
    return nn.Sequential(Encoder(), Quantizer(), Decoder())


def blocks(model):
    return list(model)


def example_batch(batch_size):
    sound = torch.randn(batch_size, 1, SAMPLES)
    return sound, sound


def sample(generator):
    sound = torch.randn(1, SAMPLES, generator=generator).cumsum(1) / 4
    return sound, sound


def dataset():
    return Samples(sample, 48)


def loss(output, target):
    sound, commitment = output
    return mse_loss(sound, target) + commitment


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.99))


def scheduler(optimizer):
    return by_factor(optimizer, cosine_after_warm_up())
