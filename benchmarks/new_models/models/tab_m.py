"""TabM: an ensemble within one network, whose members share weights; the loss is the mean of the
members'.
"""

import torch
from made_up import Samples
from rtdl_num_embeddings import PeriodicEmbeddings
from tabm import TabM
from torch.nn.functional import cross_entropy

NUMBERS, KINDS, CLASSES, MEMBERS = 6, [3, 5], 4, 8


def build_model():
    return TabM.make(
        n_num_features=NUMBERS, cat_cardinalities=KINDS, d_out=CLASSES, k=MEMBERS, n_blocks=3,
        d_block=32, dropout=0.0, num_embeddings=PeriodicEmbeddings(NUMBERS, 8, lite=False),
    )  # fmt: skip


def example_batch(batch_size):
    kinds = torch.stack([torch.randint(0, kind, (batch_size,)) for kind in KINDS], 1)
    return (torch.randn(batch_size, NUMBERS), kinds), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    kinds = torch.stack([torch.randint(0, kind, (), generator=generator) for kind in KINDS])
    label = torch.randint(0, CLASSES, (), generator=generator)
    return (torch.randn(NUMBERS, generator=generator), kinds), label


def dataset():
    return Samples(sample, 48)  # the model is captured for one size of microbatches


def loss(output, target):
    return cross_entropy(output.flatten(0, 1), target.repeat_interleave(MEMBERS))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=3e-4)
