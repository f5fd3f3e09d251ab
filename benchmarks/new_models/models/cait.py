"""CaiT of timm: scales of layers, attention of the class alone. Images are mixed by NumPy in
`collate`; timm's LAMB.
"""

import torch
import without_torchvision  # noqa: F401
from made_up import Samples
from schedules import by_factor, cosine_after_warm_up
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models.cait import Cait
from timm.optim import create_optimizer_v2
from torch.utils.data import default_collate

CLASSES, SIZE = 10, 32


def build_model():
    return Cait(
        img_size=SIZE, patch_size=8, num_classes=CLASSES, embed_dim=32, depth=4, num_heads=4,
        init_values=0.1, depth_token_only=1,
    )  # fmt: skip


def example_batch(batch_size):
    classes = torch.randn(batch_size, CLASSES).softmax(1)
    return torch.randn(batch_size, 3, SIZE, SIZE), classes


def sample(generator):
    label = torch.randint(0, CLASSES, (), generator=generator)
    return torch.randn(3, SIZE, SIZE, generator=generator), label


def dataset():
    return Samples(sample, 48)


def collate(samples):
    mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    return mix(*default_collate(samples))


def loss(output, target):
    return SoftTargetCrossEntropy()(output, target)


def optimizer(named_parameters):
    return create_optimizer_v2(named_parameters, opt="lamb", lr=5e-3, weight_decay=0.02)


def scheduler(optimizer):
    return by_factor(optimizer, cosine_after_warm_up())
