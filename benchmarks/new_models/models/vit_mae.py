"""ViT-MAE: patches are left out by noise, which is part of the data here; the loss is a mean over
left-out patches.
"""

import torch
from made_up import Samples
from transformers import ViTMAEConfig, ViTMAEForPreTraining

PATCHES = 64


def build_model():
    return ViTMAEForPreTraining(
        ViTMAEConfig(
            image_size=32, patch_size=4, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=96, decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
            decoder_intermediate_size=64,
        )
    )  # fmt: skip


def example_batch(batch_size):
    return (
        (),
        {
            "pixel_values": torch.randn(batch_size, 3, 32, 32),
            "noise": torch.rand(batch_size, PATCHES),
        },
        None,
    )


def sample(generator):
    image, noise = (
        torch.randn(3, 32, 32, generator=generator),
        torch.rand(PATCHES, generator=generator),
    )
    return (), {"pixel_values": image, "noise": noise}, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
