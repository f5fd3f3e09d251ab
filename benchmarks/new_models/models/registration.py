"""Kornia: a network finds the homography that lays one picture over another; warped and compared by
SSIM.
"""

import torch
from kornia.geometry.transform import warp_perspective
from kornia.losses import ssim_loss
from made_up import Samples
from torch import nn
from torch.nn.functional import l1_loss

SIZE = 24


class Registration(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 8, 5, 2),
            nn.InstanceNorm2d(8, affine=True),
            nn.ReLU(),
            nn.Conv2d(8, 16, 5, 2),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 8))
        nn.init.normal_(self.head[-1].weight, std=1e-3)
        nn.init.zeros_(self.head[-1].bias)

    def forward(self, moving, fixed):
        offsets = self.head(self.features(torch.cat([moving, fixed], 1))) * 0.1
        ninth = torch.zeros_like(offsets[:, :1])
        matrix = torch.eye(3, device=moving.device) + torch.cat([offsets, ninth], 1).view(-1, 3, 3)
        return warp_perspective(moving, matrix, (SIZE, SIZE), padding_mode="border")


def build_model():
    return Registration()


def example_batch(batch_size):
    fixed = torch.rand(batch_size, 1, SIZE, SIZE)
    return (fixed.roll(1, 3), fixed), fixed


def sample(generator):
    fixed = torch.rand(1, SIZE, SIZE, generator=generator)
    return (fixed.roll(1, 2), fixed), fixed


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return ssim_loss(output, target, window_size=5) + l1_loss(output, target)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
