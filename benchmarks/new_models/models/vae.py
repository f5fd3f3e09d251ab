"""Stable Diffusion's autoencoder of diffusers: it draws its latents, so the noise is part of the
data here.
"""

import torch
from diffusers import AutoencoderKL
from made_up import Samples
from torch import nn
from torch.nn.functional import mse_loss


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.vae = AutoencoderKL(
            block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, sample_size=32,
        )  # fmt: skip

    def forward(self, images, noise):
        latent = self.vae.encode(images).latent_dist
        return self.vae.decode(latent.mean + latent.std * noise).sample, latent.kl()


def build_model():
    return Autoencoder()


def example_batch(batch_size):
    images = torch.randn(batch_size, 3, 32, 32)
    return (images, torch.randn(batch_size, 4, 16, 16)), images


def sample(generator):
    image = torch.randn(3, 32, 32, generator=generator)
    return (image, torch.randn(4, 16, 16, generator=generator)), image


def dataset():
    return Samples(sample, 36)


def loss(output, target):
    images, divergence = output
    return mse_loss(images, target) + 1e-4 * divergence.mean()


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
