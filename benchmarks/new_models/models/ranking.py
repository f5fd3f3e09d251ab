"""A recommender: bags of ids of different lengths, products of all pairs of features, and a weight
for each sample.
"""

import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

TABLES, ROWS, BAG = 4, 50, 6


class Ranking(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 16, padding_idx=0) for _ in range(TABLES))
        self.dense = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 16))
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(16 + pairs, 64), nn.SiLU(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1)
        )

    def forward(self, dense, bags):
        features = [self.dense(dense)]
        for table, bag in zip(self.tables, bags.unbind(1), strict=True):
            features.append(table(bag).sum(1) / (bag > 0).sum(1, keepdim=True).clamp(min=1))
        stacked = torch.stack(features, 1)
        rows, columns = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        products = (stacked @ stacked.mT)[:, rows, columns]
        return self.top(torch.cat([features[0], products], 1)).squeeze(1)


def build_model():
    return Ranking()


def example_batch(batch_size):
    bags = torch.randint(1, ROWS, (batch_size, TABLES, BAG))
    return (torch.randn(batch_size, 8), bags), (
        torch.rand(batch_size).round(),
        torch.rand(batch_size) + 0.5,
    )


def sample(generator):
    bags = torch.randint(1, ROWS, (TABLES, BAG), generator=generator)
    bags = bags * (torch.rand(TABLES, BAG, generator=generator) < 0.6)
    clicked, weight = torch.rand(2, generator=generator).unbind()
    return (torch.randn(8, generator=generator), bags), (clicked.round(), weight + 0.5)


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    clicked, weight = target
    return (weight * binary_cross_entropy_with_logits(output, clicked, reduction="none")).mean()


def optimizer(parameters):
    return torch.optim.Adagrad(parameters, lr=0.05)
