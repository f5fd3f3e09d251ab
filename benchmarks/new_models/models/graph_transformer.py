"""A GraphGPS transformer of PyTorch Geometric: local messages beside attention over all nodes; it
has blocks.
"""

import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GINEConv, GPSConv

NODES, EDGES, KINDS, CLASSES = 8, 14, 6, 4


class Inputs(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.node_emb, self.edge_emb = nn.Embedding(KINDS, channels), nn.Embedding(4, channels)

    def forward(self, kinds, edges, bonds):
        return self.node_emb(kinds), edges, self.edge_emb(bonds)


class Layer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        local = nn.Sequential(
            nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels)
        )
        self.conv = GPSConv(channels, GINEConv(local), heads=4, norm="layer_norm")

    def forward(self, state):
        nodes, edges, bonds = state
        graphs = torch.arange(nodes.shape[0], device=nodes.device)
        flat = (edges + NODES * graphs[:, None, None]).transpose(0, 1).flatten(1)
        updated = self.conv(
            nodes.flatten(0, 1),
            flat,
            graphs.repeat_interleave(NODES),
            edge_attr=bonds.flatten(0, 1),
        )
        return updated.view_as(nodes), edges, bonds


class Head(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, CLASSES)
        )

    def forward(self, state):
        return self.mlp(state[0].sum(1))


class GraphGPS(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.inputs, self.head = Inputs(channels), Head(channels)
        self.layers = nn.ModuleList(Layer(channels) for _ in range(3))

    def forward(self, kinds, edges, bonds):
        state = self.inputs(kinds, edges, bonds)
        for layer in self.layers:
            state = layer(state)
        return self.head(state)


def build_model():
    return GraphGPS()


def blocks(model):
    return [model.inputs, *model.layers, model.head]


def example_batch(batch_size):
    edges = torch.randint(0, NODES, (batch_size, 2, EDGES))
    kinds, bonds = (
        torch.randint(0, KINDS, (batch_size, NODES)),
        torch.randint(0, 4, (batch_size, EDGES)),
    )
    return (kinds, edges, bonds), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    edges = torch.randint(0, NODES, (2, EDGES), generator=generator)
    kinds = torch.randint(0, KINDS, (NODES,), generator=generator)
    bonds = torch.randint(0, 4, (EDGES,), generator=generator)
    return (kinds, edges, bonds), torch.randint(0, CLASSES, (), generator=generator)


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output, target)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-5)
