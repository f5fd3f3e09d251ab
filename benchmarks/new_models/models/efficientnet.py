"""EfficientNetV2 of timm: depthwise convolutions, squeeze and excitation, BatchNorm."""

import timm
import torch
from made_up import Samples
from torch.nn.functional import cross_entropy

CLASSES = 10


def build_model():
    return timm.create_model("test_efficientnet", num_classes=CLASSES)


def example_batch(batch_size):
    return torch.randn(batch_size, 3, 64, 64), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    return torch.randn(3, 64, 64, generator=generator), torch.randint(
        0, CLASSES, (), generator=generator
    )


def dataset():
    return Samples(sample, 48)


def loss(output, target):
    return cross_entropy(output, target)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
