"""DDPM: a UNet of diffusers learns the noise that is drawn for an image whenever it is read."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

SIZE = 16


def build_model():
    return UNet2DModel(
        sample_size=SIZE, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(16, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8, attention_head_dim=8,
    )  # fmt: skip


class Noised(Dataset):
    """Images with noise and a time that PyTorch's generator draws."""

    def __init__(self):
        self._schedule = DDPMScheduler()

    def __len__(self):
        return 52

    def __getitem__(self, index):
        image = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(index))
        time = torch.randint(0, 1000, ())
        noise = torch.randn_like(image)
        noised = self._schedule.add_noise(image[None], noise[None], time[None])[0]
        return (noised, time), noise


def example_batch(batch_size):
    images = torch.randn(batch_size, 3, SIZE, SIZE)
    return (images, torch.randint(0, 1000, (batch_size,))), torch.randn_like(images)


def dataset():
    return Noised()


def loss(output, target):
    return mse_loss(output.sample, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-6)


def scheduler(optimizer):
    return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)
