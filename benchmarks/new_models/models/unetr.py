"""UNETR of MONAI: a transformer over patches of a volume feeds a convolutional decoder; Dice and
cross entropy.
"""

import torch
from made_up import Samples
from monai.losses import DiceCELoss
from monai.networks.nets import UNETR

SIZE, CLASSES = 32, 3


def build_model():
    return UNETR(
        in_channels=1, out_channels=CLASSES, img_size=(SIZE, SIZE), feature_size=4, hidden_size=24, mlp_dim=48,
        num_heads=4, norm_name="instance", spatial_dims=2,
    )  # fmt: skip


def example_batch(batch_size):
    return torch.randn(batch_size, 1, SIZE, SIZE), torch.randint(
        0, CLASSES, (batch_size, 1, SIZE, SIZE)
    )


def sample(generator):
    labels = torch.randint(0, CLASSES, (1, SIZE, SIZE), generator=generator)
    return torch.randn(1, SIZE, SIZE, generator=generator), labels


def dataset():
    return Samples(sample, 40)


def loss(output, target):
    return DiceCELoss(to_onehot_y=True, softmax=True)(output, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
