"""Hiera of timm, fine-tuned: rates fall by layer, as timm's groups have it; Lion, and OneCycleLR
per group.
"""

import torch
import without_torchvision  # noqa: F401
from made_up import Samples
from timm.models.hiera import Hiera
from timm.optim import Lion
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

CLASSES, SIZE, DECAY = 10, 64, 0.7


def build_model():
    return Hiera(
        img_size=(SIZE, SIZE), num_classes=CLASSES, embed_dim=16, num_heads=1, stages=(1, 1, 2),
        q_pool=2, mask_unit_size=(4, 4), drop_path_rate=0.0,
    )  # fmt: skip


def example_batch(batch_size):
    return torch.randn(batch_size, 3, SIZE, SIZE), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    label = torch.randint(0, CLASSES, (), generator=generator)
    return torch.randn(3, SIZE, SIZE, generator=generator), label


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output, target, label_smoothing=0.1)


def rate(name):
    """Return the greatest rate of a parameter: less for those far from the head."""
    if name.startswith("head"):
        return 1e-3
    block = int(name.split(".")[1]) if name.startswith("blocks") else -1
    return 1e-3 * DECAY ** (4 - block)


def optimizer(named_parameters):
    pairs = list(named_parameters)
    rates = sorted({rate(name) for name, _ in pairs})
    groups = [
        {"params": [weight for name, weight in pairs if rate(name) == each], "lr": each}
        for each in rates
    ]
    return Lion(groups, weight_decay=0.1)


def scheduler(optimizer):
    rates = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, max_lr=rates, total_steps=9, pct_start=0.3)
