"""Super-resolution with a frozen network of LPIPS as the loss: weights that the optimizer must not
move.
"""

import lpips
import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import l1_loss

SMALL, FACTOR = 32, 2


class Enlarger(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.PReLU(),
            nn.Conv2d(16, 3 * FACTOR**2, 3, padding=1), nn.PixelShuffle(FACTOR), nn.Tanh(),
        )  # fmt: skip
        self.judge = lpips.LPIPS(net="squeeze", pretrained=False, pnet_rand=True, verbose=False)
        self.judge.requires_grad_(False)

    def forward(self, small, large):
        grown = self.grow(small)
        return {"loss": l1_loss(grown, large) + self.judge(grown, large).mean()}


def build_model():
    return Enlarger()


def example_batch(batch_size):
    large = torch.rand(batch_size, 3, SMALL * FACTOR, SMALL * FACTOR) * 2 - 1
    return (large[:, :, ::FACTOR, ::FACTOR].clone(), large), None


def sample(generator):
    large = torch.rand(3, SMALL * FACTOR, SMALL * FACTOR, generator=generator) * 2 - 1
    return (large[:, ::FACTOR, ::FACTOR].clone(), large), None


def dataset():
    return Samples(sample, 36)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
