"""SegFormer: a class for each pixel, and pixels that do not count; its decoder normalises over the
batch.
"""

import torch
from made_up import Samples
from transformers import SegformerConfig, SegformerForSemanticSegmentation

CLASSES, UNKNOWN = 6, 255


def build_model():
    return SegformerForSemanticSegmentation(
        SegformerConfig(
            depths=[1, 1, 1, 1], hidden_sizes=[16, 24, 32, 40], num_attention_heads=[1, 2, 2, 4],
            decoder_hidden_size=32, drop_path_rate=0.0, classifier_dropout_prob=0.0, num_labels=CLASSES,
        )
    )  # fmt: skip


def example_batch(batch_size):
    return (torch.randn(batch_size, 3, 64, 64),), torch.randint(0, CLASSES, (batch_size, 64, 64))


def sample(generator):
    labels = torch.randint(0, CLASSES, (64, 64), generator=generator)
    labels[: int(torch.randint(1, 40, (), generator=generator))] = UNKNOWN
    return (torch.randn(3, 64, 64, generator=generator),), labels


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    logits = torch.nn.functional.interpolate(output.logits, size=target.shape[-2:], mode="bilinear")
    return torch.nn.functional.cross_entropy(logits, target, ignore_index=UNKNOWN)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
