"""A GraphGPS transformer of PyTorch Geometric: local messages beside attention over all nodes of a graph."""

import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GINEConv, GPSConv, global_add_pool

NODES, EDGES, KINDS, CLASSES = 8, 14, 6, 4


class GraphGPS(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.node_emb, self.edge_emb = nn.Embedding(KINDS, channels), nn.Embedding(4, channels)
        self.convs = nn.ModuleList()
        for _ in range(3):
            local = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))
            self.convs.append(GPSConv(channels, GINEConv(local), heads=4, norm="layer_norm"))
        self.mlp = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, CLASSES))

    def forward(self, kinds, edges, bonds):
        graphs = kinds.shape[0]
        batch = torch.arange(graphs, device=kinds.device).repeat_interleave(NODES)
        edges = edges + NODES * torch.arange(graphs, device=kinds.device)[:, None, None]
        nodes, edges = self.node_emb(kinds.flatten()), edges.transpose(0, 1).flatten(1)
        for conv in self.convs:
            nodes = conv(nodes, edges, batch, edge_attr=self.edge_emb(bonds.flatten()))
        return self.mlp(global_add_pool(nodes, batch))


def build_model():
    return GraphGPS()


def example_batch(batch_size):
    edges = torch.randint(0, NODES, (batch_size, 2, EDGES))
    kinds, bonds = torch.randint(0, KINDS, (batch_size, NODES)), torch.randint(0, 4, (batch_size, EDGES))
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
