"""Embeddings of pictures by the triplet loss of pytorch-metric-learning, over all triplets of a
minibatch.
"""

import torch
from made_up import Samples
from pytorch_metric_learning import losses, miners
from torch import nn

CLASSES = 3


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 32),
        nn.ReLU(), nn.Linear(32, 16),
    )  # fmt: skip


def example_batch(batch_size):
    return torch.randn(batch_size, 1, 28, 28), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    return torch.randn(1, 28, 28, generator=generator), torch.randint(
        0, CLASSES, (), generator=generator
    )


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    pairs = miners.MultiSimilarityMiner()(output, target)
    return losses.TripletMarginLoss()(output, target, pairs)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
