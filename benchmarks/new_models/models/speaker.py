"""ECAPA-TDNN of speechbrain: who speaks? Angles between speakers have a margin; the rate goes up
and down.
"""

import torch
import without_torchvision  # noqa: F401
from made_up import Samples
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN, Classifier
from speechbrain.nnet.losses import AdditiveAngularMargin, LogSoftmaxWrapper
from torch import nn
from torch.optim.lr_scheduler import CyclicLR

BANDS, FRAMES, SPEAKERS = 16, 40, 12


def build_model():
    embedding = ECAPA_TDNN(
        BANDS, lin_neurons=24, channels=[16, 16, 16, 16, 48], attention_channels=8,
        res2net_scale=4, se_channels=8,
    )  # fmt: skip
    return nn.Sequential(embedding, Classifier(24, lin_blocks=0, out_neurons=SPEAKERS))


def example_batch(batch_size):
    speakers = torch.randint(0, SPEAKERS, (batch_size, 1))
    return torch.randn(batch_size, FRAMES, BANDS), speakers


def sample(generator):
    speaker = torch.randint(0, SPEAKERS, (1,), generator=generator)
    return torch.randn(FRAMES, BANDS, generator=generator), speaker


def dataset():
    return Samples(sample, 48)


def loss(output, target):
    return LogSoftmaxWrapper(AdditiveAngularMargin(margin=0.2, scale=30))(output, target)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=2e-6)


def scheduler(optimizer):
    return CyclicLR(optimizer, base_lr=1e-4, max_lr=1e-3, step_size_up=3, cycle_momentum=False)
