"""ConvNeXt V2: depthwise convolutions, and a normalisation over the responses of a whole image."""

import torch
from made_up import Samples
from torch.nn.functional import cross_entropy
from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

CLASSES = 10


def build_model():
    return ConvNextV2ForImageClassification(
        ConvNextV2Config(
            depths=[1, 1, 2, 1],
            hidden_sizes=[16, 24, 32, 48],
            drop_path_rate=0.0,
            num_labels=CLASSES,
            image_size=64,
        )
    )


def example_batch(batch_size):
    return torch.randn(batch_size, 3, 64, 64), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    return torch.randn(3, 64, 64, generator=generator), torch.randint(
        0, CLASSES, (), generator=generator
    )


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output.logits, target, label_smoothing=0.1)


def optimizer(parameters):
    return torch.optim.NAdam(parameters, lr=1e-3)
