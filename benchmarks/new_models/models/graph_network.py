"""A network over graphs that adds up messages along edges with scatter; graphs have as many nodes,
but other edges.
"""

import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

NODES, EDGES, FEATURES = 12, 30, 16


class Layer(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.message, self.update = (
            nn.Linear(2 * features, features),
            nn.GRUCell(features, features),
        )

    def forward(self, nodes, edges):
        source, target = (edges[:, side, :, None].expand(-1, -1, nodes.shape[2]) for side in (0, 1))
        messages = self.message(
            torch.cat([nodes.gather(1, source), nodes.gather(1, target)], 2)
        ).relu()
        received = torch.zeros_like(nodes).scatter_add(1, target, messages)
        return self.update(received.flatten(0, 1), nodes.flatten(0, 1)).view_as(nodes)


class GraphNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(FEATURES, 32)
        self.layers = nn.ModuleList(Layer(32) for _ in range(4))
        self.head = nn.Linear(32, 1)

    def forward(self, nodes, edges):
        nodes = self.inputs(nodes)
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return self.head(nodes.mean(1)).squeeze(1)


def build_model():
    return GraphNetwork()


def example_batch(batch_size):
    edges = torch.randint(0, NODES, (batch_size, 2, EDGES))
    return (torch.randn(batch_size, NODES, FEATURES), edges), torch.randint(
        0, 2, (batch_size,)
    ).float()


def sample(generator):
    edges = torch.randint(0, NODES, (2, EDGES), generator=generator)
    target = torch.randint(0, 2, (), generator=generator).float()
    return (torch.randn(NODES, FEATURES, generator=generator), edges), target


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return binary_cross_entropy_with_logits(output, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
