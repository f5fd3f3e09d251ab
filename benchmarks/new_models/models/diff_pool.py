"""DiffPool of torch_geometric: graphs are pooled by what the model learns, with two further losses
of whole batches.
"""

import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch_geometric.nn import DenseSAGEConv, dense_diff_pool

NODES, FEATURES, WIDTH, CLASSES = 12, 8, 24, 3


class Layers(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = DenseSAGEConv(inputs, WIDTH), DenseSAGEConv(WIDTH, outputs)

    def forward(self, nodes, edges):
        return self.second(self.first(nodes, edges).relu(), edges)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.pools = nn.ModuleList([Layers(FEATURES, 6), Layers(WIDTH, 2)])
        self.embeds = nn.ModuleList([Layers(FEATURES, WIDTH), Layers(WIDTH, WIDTH)])
        self.last = Layers(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes, edges):
        further = 0
        for pool, embed in zip(self.pools, self.embeds, strict=True):
            clusters, nodes = pool(nodes, edges), embed(nodes, edges).relu()
            nodes, edges, link, entropy = dense_diff_pool(nodes, edges, clusters)
            further = further + link + entropy
        return self.head(self.last(nodes, edges).mean(1)), further


def build_model():
    return Pooled()


def example_batch(batch_size):
    edges = (torch.rand(batch_size, NODES, NODES) < 0.3).float()
    return (torch.randn(batch_size, NODES, FEATURES), edges), torch.randint(
        0, CLASSES, (batch_size,)
    )


def sample(generator):
    edges = (torch.rand(NODES, NODES, generator=generator) < 0.3).float()
    label = torch.randint(0, CLASSES, (), generator=generator)
    return (torch.randn(NODES, FEATURES, generator=generator), edges), label


def dataset():
    return Samples(sample, 20)


def loss(output, target):
    scores, further = output
    return cross_entropy(scores, target) + further


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def scheduler(optimizer):
    return StepLR(optimizer, step_size=3, gamma=0.5)
