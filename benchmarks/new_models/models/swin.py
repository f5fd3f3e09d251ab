"""Swin: windows that shift, patches that merge."""

import torch
from made_up import Samples
from torch.nn.functional import cross_entropy
from transformers import SwinConfig, SwinForImageClassification

CLASSES = 10


def build_model():
    return SwinForImageClassification(
        SwinConfig(
            image_size=32, patch_size=2, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4,
            drop_path_rate=0.0, num_labels=CLASSES,
        )
    )  # fmt: skip


def example_batch(batch_size):
    return torch.randn(batch_size, 3, 32, 32), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    return torch.randn(3, 32, 32, generator=generator), torch.randint(
        0, CLASSES, (), generator=generator
    )


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output.logits, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
