"""A Performer: linear attention by random features, which are not drawn anew, and rotary
positions.
"""

import torch
from made_up import Samples
from performer_pytorch import PerformerLM
from torch.nn.functional import cross_entropy

WORDS, LENGTH = 128, 24


def build_model():
    model = PerformerLM(
        num_tokens=WORDS, max_seq_len=LENGTH, dim=32, depth=3, heads=4, dim_head=8, causal=False, nb_features=16,
        feature_redraw_interval=1000,
    )  # fmt: skip
    model.fix_projection_matrices_()
    return model


def example_batch(batch_size):
    return torch.randint(0, WORDS, (batch_size, LENGTH)), torch.randint(
        0, WORDS, (batch_size, LENGTH)
    )


def sample(generator):
    tokens = torch.randint(0, WORDS, (LENGTH,), generator=generator)
    hidden = torch.rand(LENGTH, generator=generator) < 0.15
    hidden[0] = True
    return tokens.where(~hidden, 0), tokens.where(hidden, -100)


def dataset():
    # captured for microbatches of four, so that the last must not be smaller
    return Samples(sample, 48)


def loss(output, target):
    return cross_entropy(output.transpose(1, 2), target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
