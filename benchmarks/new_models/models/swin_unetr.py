"""Swin UNETR of MONAI: shifted windows feed a convolutional decoder; Dice and cross entropy."""

import torch
from made_up import Samples
from monai.losses import DiceCELoss
from monai.networks.nets import SwinUNETR
from monai.optimizers import WarmupCosineSchedule

SIZE, CLASSES = 64, 3


def build_model():
    return SwinUNETR(
        in_channels=1, out_channels=CLASSES, feature_size=12, depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 4), window_size=4, spatial_dims=2,
    )  # fmt: skip


def example_batch(batch_size):
    labels = torch.randint(0, CLASSES, (batch_size, 1, SIZE, SIZE))
    return torch.randn(batch_size, 1, SIZE, SIZE), labels


def sample(generator):
    labels = torch.randint(0, CLASSES, (1, SIZE, SIZE), generator=generator)
    return torch.randn(1, SIZE, SIZE, generator=generator), labels


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return DiceCELoss(to_onehot_y=True, softmax=True)(output, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-5)


def scheduler(optimizer):
    return WarmupCosineSchedule(optimizer, warmup_steps=2, t_total=8)
