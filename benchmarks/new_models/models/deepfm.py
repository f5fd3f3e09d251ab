"""DeepFM of DeepCTR-Torch: all columns in one tensor, and a regularisation loss that the model
computes itself.
"""

import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DeepFM
from made_up import Samples
from torch.nn.functional import binary_cross_entropy

CATEGORIES, NUMBERS, ROWS = 6, 4, 30


def build_model():
    columns = [
        SparseFeat(f"C{column}", vocabulary_size=ROWS, embedding_dim=8)
        for column in range(CATEGORIES)
    ]
    columns += [DenseFeat(f"I{column}", 1) for column in range(NUMBERS)]
    seed = int(torch.randint(0, 1000, ()))
    return DeepFM(columns, columns, dnn_hidden_units=(64, 32, 16), task="binary", seed=seed)


def example_batch(batch_size):
    categories = torch.randint(0, ROWS, (batch_size, CATEGORIES))
    rows = torch.cat([categories.float(), torch.rand(batch_size, NUMBERS)], 1)
    return rows, torch.rand(batch_size, 1).round()


def sample(generator):
    categories = torch.randint(0, ROWS, (CATEGORIES,), generator=generator)
    row = torch.cat([categories.float(), torch.rand(NUMBERS, generator=generator)])
    return row, torch.rand(1, generator=generator).round()


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return binary_cross_entropy(output, target)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)
