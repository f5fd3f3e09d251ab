"""ELECTRA: which words were replaced? NumPy replaces others whenever a text is read. Rates fall
layer by layer.
"""

import re

import numpy as np
import torch
from schedules import linear_after_warm_up
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import ElectraConfig, ElectraForPreTraining

WORDS, LENGTH, LAYERS, DECAY = 200, 24, 4, 0.8


def build_model():
    return ElectraForPreTraining(
        ElectraConfig(
            vocab_size=WORDS, embedding_size=24, hidden_size=48, num_hidden_layers=LAYERS,
            num_attention_heads=4, intermediate_size=96, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


class Replaced(Dataset):
    """Texts as long as each other, in which NumPy's generator replaces a few words each time."""

    def __len__(self):
        return 52

    def __getitem__(self, index):
        words = np.random.default_rng(index).integers(1, WORDS, LENGTH)
        replaced = np.random.rand(LENGTH) < 0.2
        inputs = np.where(replaced, np.random.randint(1, WORDS, LENGTH), words)
        labels = torch.from_numpy(inputs != words).long()
        return (), {"input_ids": torch.from_numpy(inputs), "labels": labels}, None


def example_batch(batch_size):
    labels = torch.randint(0, 2, (batch_size, LENGTH))
    return (), {"input_ids": torch.randint(1, WORDS, (batch_size, LENGTH)), "labels": labels}, None


def dataset():
    return Replaced()


def depth(name):
    """Return how many layers are between this parameter and the head."""
    layer = re.search(r"layer\.(\d+)\.", name)
    if layer:
        return LAYERS - int(layer[1])
    return LAYERS + 1 if "embeddings" in name else 0


def optimizer(named_parameters):
    groups = [
        {
            "params": [weight],
            "lr": 2e-3 * DECAY ** depth(name),
            "weight_decay": 0.01 * (weight.ndim > 1),
        }
        for name, weight in named_parameters
    ]
    return torch.optim.AdamW(groups, eps=1e-6)


def scheduler(optimizer):
    return LambdaLR(optimizer, linear_after_warm_up())
