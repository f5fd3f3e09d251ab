"""EGNN: a network over points that turns with them; atoms beyond a molecule's end are masked."""

import torch
from egnn_pytorch import EGNN_Network
from made_up import Samples
from torch import nn
from torch.nn.functional import l1_loss
from torch.optim.lr_scheduler import CosineAnnealingLR

ATOMS, KINDS = 8, 6


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = EGNN_Network(
            num_tokens=KINDS, num_positions=ATOMS, dim=16, depth=3, num_nearest_neighbors=4,
            norm_coors=True, coor_weights_clamp_value=2.0,
        )  # fmt: skip
        self.head = nn.Linear(16, 1)

    def forward(self, kinds, places, mask):
        features, _ = self.net(kinds, places, mask=mask)
        return (self.head(features)[..., 0] * mask).sum(1)


def build_model():
    return Energy()


def example_batch(batch_size):
    kinds = torch.randint(0, KINDS, (batch_size, ATOMS))
    mask = torch.ones(batch_size, ATOMS, dtype=torch.bool)
    return (kinds, torch.randn(batch_size, ATOMS, 3), mask), torch.randn(batch_size)


def sample(generator):
    kinds = torch.randint(0, KINDS, (ATOMS,), generator=generator)
    places = torch.randn(ATOMS, 3, generator=generator)
    mask = torch.arange(ATOMS) < int(torch.randint(5, ATOMS + 1, (), generator=generator))
    return (kinds, places, mask), places.norm(dim=1).sum()


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return l1_loss(output, target)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-16)


def scheduler(optimizer):
    return CosineAnnealingLR(optimizer, 8)
