"""vit-pytorch's wrapper for distillation: a frozen teacher in eval mode, run without gradients; it
returns the loss.
"""

from itertools import pairwise

import torch
import without_torchvision  # noqa: F401
from made_up import Samples
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from vit_pytorch.distill import DistillableViT, DistillWrapper

CLASSES, SIZE = 10, 32


def teacher():
    """Return a small convolutional network, whose statistics and dropout must rest."""
    widths = (3, 8, 16, 32)
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, CLASSES)]
    return nn.Sequential(*layers).requires_grad_(False).eval()


def build_model():
    student = DistillableViT(
        image_size=SIZE, patch_size=8, num_classes=CLASSES, dim=32, depth=3, heads=4, dim_head=8,
        mlp_dim=64,
    )  # fmt: skip
    return DistillWrapper(teacher=teacher(), student=student, temperature=3.0, alpha=0.5)


def example_batch(batch_size):
    labels = torch.randint(0, CLASSES, (batch_size,))
    return {"img": torch.randn(batch_size, 3, SIZE, SIZE), "labels": labels}, None


def sample(generator):
    labels = torch.randint(0, CLASSES, (), generator=generator)
    return {"img": torch.randn(3, SIZE, SIZE, generator=generator), "labels": labels}, None


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return output


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05)


def scheduler(optimizer):
    return CosineAnnealingLR(optimizer, T_max=8)
