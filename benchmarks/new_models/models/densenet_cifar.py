"""DenseNet for CIFAR of pytorchcv; images are shifted and mirrored by Python's generator whenever
they are read.
"""

import random

import torch
import without_torchvision  # noqa: F401
from pytorchcv.models.densenet_cifar import CIFARDenseNet
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import Dataset

CLASSES, SIZE = 10, 32


def build_model():
    channels = [[12, 16], [14, 18], [15, 21]]
    return CIFARDenseNet(channels, init_block_channels=8, bottleneck=True, num_classes=CLASSES)


class Shifted(Dataset):
    """Images that are padded, cut at a random place, and mirrored by chance, as everybody does for
    CIFAR.
    """

    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, SIZE, SIZE, generator=generator)
        label = torch.randint(0, CLASSES, (), generator=generator)
        padded = pad(image, (4, 4, 4, 4))
        top, left = random.randrange(9), random.randrange(9)
        cut = padded[:, top : top + SIZE, left : left + SIZE]
        return cut.flip(2) if random.random() < 0.5 else cut.clone(), label


def example_batch(batch_size):
    return torch.randn(batch_size, 3, SIZE, SIZE), torch.randint(0, CLASSES, (batch_size,))


def dataset():
    return Shifted()


def loss(output, target):
    return cross_entropy(output, target)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)


def scheduler(optimizer):
    return MultiStepLR(optimizer, milestones=[4, 6], gamma=0.1)
