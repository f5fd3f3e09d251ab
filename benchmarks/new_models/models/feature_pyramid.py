"""A feature pyramid of segmentation_models_pytorch; pixels without label are 255, which the focal
loss ignores.
"""

import torch
import without_torchvision  # noqa: F401
from made_up import Samples
from segmentation_models_pytorch import FPN
from segmentation_models_pytorch.losses import FocalLoss
from torch.optim.lr_scheduler import OneCycleLR

SIZE, CLASSES, IGNORED = 64, 4, 255


def build_model():
    return FPN(
        "tu-test_resnet", encoder_depth=5, encoder_weights=None, decoder_pyramid_channels=16,
        decoder_segmentation_channels=32, decoder_dropout=0.0, classes=CLASSES,
    )  # fmt: skip


def example_batch(batch_size):
    labels = torch.randint(0, CLASSES, (batch_size, SIZE, SIZE))
    return torch.randn(batch_size, 3, SIZE, SIZE), labels


def sample(generator):
    labels = torch.randint(0, CLASSES, (SIZE, SIZE), generator=generator)
    border = int(torch.randint(0, SIZE // 2, (), generator=generator))
    labels[:border] = IGNORED
    return torch.randn(3, SIZE, SIZE, generator=generator), labels


def dataset():
    return Samples(sample, 48)


def loss(output, target):
    return FocalLoss("multiclass", ignore_index=IGNORED)(output, target)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


def scheduler(optimizer):
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
