"""MaxViT of vit-pytorch: convolutions with squeeze and excitation, attention in blocks and over a
grid.
"""

import torch
from made_up import Samples
from torch.nn.functional import cross_entropy
from vit_pytorch.max_vit import MaxViT

CLASSES = 10


def build_model():
    return MaxViT(
        num_classes=CLASSES, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1), window_size=4,
        mbconv_expansion_rate=2, mbconv_shrinkage_rate=0.25, dropout=0.0,
    )  # fmt: skip


def example_batch(batch_size):
    return torch.randn(batch_size, 3, 32, 32), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    return torch.randn(3, 32, 32, generator=generator), torch.randint(
        0, CLASSES, (), generator=generator
    )


def dataset():
    return Samples(sample, 48)


def loss(output, target):
    return cross_entropy(output, target, label_smoothing=0.1)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
