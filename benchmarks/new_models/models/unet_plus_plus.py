"""A U-Net++ of segmentation-models-pytorch with a ResNet as its encoder, trained by Dice's loss."""

import segmentation_models_pytorch as smp
import torch
from made_up import Samples


def build_model():
    return smp.UnetPlusPlus(
        encoder_name="resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(32, 16, 16), in_channels=1,
        classes=1, decoder_attention_type="scse",
    )  # fmt: skip


def example_batch(batch_size):
    return torch.randn(batch_size, 1, 32, 32), torch.rand(batch_size, 1, 32, 32).round()


def sample(generator):
    return torch.randn(1, 32, 32, generator=generator), torch.rand(
        1, 32, 32, generator=generator
    ).round()


def dataset():
    return Samples(sample, 48)


def loss(output, target):
    return smp.losses.DiceLoss(mode="binary", from_logits=True)(output, target)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
