"""VQ-VAE: the nearest of some vectors stands for what the encoder gives, and gradients pass it
straight through.
"""

import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import mse_loss


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 24, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(24, 32, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(32, 16, 1),
        )
        self.codes = nn.Embedding(32, 16)
        self.decoder = nn.Sequential(
            nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(32, 24, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(24, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, images):
        encoded = self.encoder(images).permute(0, 2, 3, 1)
        code = self.codes(torch.cdist(encoded.flatten(0, 2), self.codes.weight).argmin(1)).view_as(
            encoded
        )
        kept = mse_loss(code, encoded.detach()) + 0.25 * mse_loss(encoded, code.detach())
        passed = encoded + (code - encoded).detach()
        return self.decoder(passed.permute(0, 3, 1, 2)), kept


def build_model():
    return Quantised()


def example_batch(batch_size):
    images = torch.rand(batch_size, 3, 32, 32)
    return images, images


def sample(generator):
    image = torch.rand(3, 32, 32, generator=generator)
    return image, image


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    images, kept = output
    return mse_loss(images, target) + kept


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
