"""An equivariant network of e3nn over molecules: tensor products of irreducible representations,
gated.
"""

import torch
from e3nn import o3
from e3nn.math import soft_one_hot_linspace
from e3nn.nn.models.v2106.gate_points_message_passing import MessagePassing
from made_up import Samples
from torch import nn
from torch.nn.functional import mse_loss

ATOMS, KINDS, BASIS = 5, 4, 6


class Molecules(nn.Module):
    def __init__(self):
        super().__init__()
        self.harmonics = o3.Irreps.spherical_harmonics(lmax=1)
        self.embedding = nn.Embedding(KINDS, 8)
        self.passing = MessagePassing(
            irreps_node_sequence=["8x0e", "8x0e + 4x1o", "8x0e + 4x1o", "4x0e"],
            irreps_node_attr="1x0e",
            irreps_edge_attr=self.harmonics,
            fc_neurons=[BASIS, 16],
            num_neighbors=ATOMS - 1,
        )
        pairs = torch.tensor([[a, b] for a in range(ATOMS) for b in range(ATOMS) if a != b])
        self.register_buffer("pairs", pairs.T.clone())
        self.head = nn.Linear(4, 1)

    def forward(self, kinds, positions):
        molecules = positions.shape[0]
        first = torch.arange(molecules, device=positions.device)[:, None] * ATOMS
        source, target = ((first + side).flatten() for side in self.pairs)
        flat = positions.flatten(0, 1)
        edges = flat[source] - flat[target]
        angles = o3.spherical_harmonics(
            self.harmonics, edges, normalize=True, normalization="component"
        )
        distances = soft_one_hot_linspace(
            edges.norm(dim=1), 0.0, 3.0, BASIS, basis="gaussian", cutoff=False
        )
        nodes = self.embedding(kinds).flatten(0, 1)
        nodes = self.passing(
            nodes, torch.ones_like(nodes[:, :1]), source, target, angles, distances * BASIS**0.5
        )
        return self.head(nodes.view(molecules, ATOMS, -1).mean(1)).squeeze(1)


def build_model():
    return Molecules()


def example_batch(batch_size):
    kinds = torch.randint(0, KINDS, (batch_size, ATOMS))
    return (kinds, torch.randn(batch_size, ATOMS, 3)), torch.randn(batch_size)


def sample(generator):
    kinds = torch.randint(0, KINDS, (ATOMS,), generator=generator)
    positions = torch.randn(ATOMS, 3, generator=generator)
    return (kinds, positions), positions.norm(dim=1).mean()


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return mse_loss(output, target)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
