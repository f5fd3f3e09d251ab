"""TabNet: sequential attention over columns by sparsemax, ghost BatchNorm, and a penalty for dense
masks.
"""

import torch
from made_up import Samples
from pytorch_tabnet.tab_network import TabNet
from torch.nn.functional import cross_entropy

COLUMNS, CLASSES = 10, 3


def build_model():
    return TabNet(
        COLUMNS, CLASSES, n_d=8, n_a=8, n_steps=3, cat_idxs=[0, 3], cat_dims=[5, 7], cat_emb_dim=[2, 2],
        virtual_batch_size=128, group_attention_matrix=torch.eye(COLUMNS),
    )  # fmt: skip


def blocks(model):
    return [model.embedder, model.tabnet]


def example_batch(batch_size):
    rows = torch.randn(batch_size, COLUMNS)
    rows[:, 0], rows[:, 3] = torch.randint(0, 5, (batch_size,)), torch.randint(0, 7, (batch_size,))
    return rows, torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    row = torch.randn(COLUMNS, generator=generator)
    row[0], row[3] = (
        torch.randint(0, 5, (), generator=generator),
        torch.randint(0, 7, (), generator=generator),
    )
    return row, torch.randint(0, CLASSES, (), generator=generator)


def dataset():
    return Samples(sample, 48)


def loss(output, target):
    scores, density = output
    return cross_entropy(scores, target) - 1e-3 * density


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=2e-2)
