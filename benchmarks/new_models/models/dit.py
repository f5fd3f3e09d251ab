"""DiT of diffusers: a diffusion transformer whose norms depend on time and class."""

import torch
from diffusers import DiTTransformer2DModel
from made_up import Samples
from torch.nn.functional import mse_loss

CLASSES = 10


def build_model():
    return DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=CLASSES, norm_num_groups=4,
    )  # fmt: skip


def example_batch(batch_size):
    steps, classes = torch.randint(0, 1000, (batch_size,)), torch.randint(0, CLASSES, (batch_size,))
    latents = torch.randn(batch_size, 4, 8, 8)
    return (
        (latents,),
        {"timestep": steps, "class_labels": classes},
        torch.randn(batch_size, 4, 8, 8),
    )


def sample(generator):
    step = torch.randint(0, 1000, (), generator=generator)
    label = torch.randint(0, CLASSES, (), generator=generator)
    latents, noise = torch.randn(2, 4, 8, 8, generator=generator)
    return (latents,), {"timestep": step, "class_labels": label}, noise


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return mse_loss(output.sample, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
