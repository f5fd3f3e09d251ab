"""MLP-Mixer of timm; images are mixed, so that the targets are distributions."""

import torch
from made_up import Samples
from timm.loss import SoftTargetCrossEntropy
from timm.models.mlp_mixer import MlpMixer

CLASSES = 10


def build_model():
    return MlpMixer(num_classes=CLASSES, img_size=32, patch_size=4, num_blocks=4, embed_dim=48)


def example_batch(batch_size):
    return torch.randn(batch_size, 3, 32, 32), torch.softmax(torch.randn(batch_size, CLASSES), 1)


def sample(generator):
    image = torch.randn(3, 32, 32, generator=generator)
    return image, torch.softmax(3 * torch.randn(CLASSES, generator=generator), 0)


def dataset():
    return Samples(sample, 52)


loss = SoftTargetCrossEntropy()


def optimizer(parameters):
    return torch.optim.RMSprop(parameters, lr=1e-4, momentum=0.9)
