"""ControlNet beside a frozen UNet of diffusers, in eval mode; `collate` draws the noise and the
times.
"""

import torch
from diffusers import ControlNetModel, DDPMScheduler, UNet2DConditionModel
from made_up import Samples
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

SIZE, WORDS = 8, 6


class Controlled(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "cross_attention_dim": 24,
            "attention_head_dim": 4,
            "norm_num_groups": 8,
        }
        up = ("UpBlock2D", "CrossAttnUpBlock2D")
        self.unet = UNet2DConditionModel(sample_size=SIZE, up_block_types=up, **blocks)
        self.control = ControlNetModel.from_unet(self.unet, conditioning_channels=3)
        self.unet.requires_grad_(False)
        self.unet.eval()

    def forward(self, latents, times, words, images):
        down, middle = self.control(latents, times, words, images, return_dict=False)
        return self.unet(
            latents,
            times,
            words,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
        ).sample


def build_model():
    model = Controlled()
    with torch.no_grad():  # else the first step would not tell
        for scale in [*model.control.controlnet_down_blocks, model.control.controlnet_mid_block]:
            scale.weight.normal_(std=0.1)
    return model


def noised(latents, words, images):
    times = torch.randint(0, 1000, latents.shape[:1])
    noise = torch.randn(latents.shape)
    return (DDPMScheduler().add_noise(latents, noise, times), times, words, images), noise


def example_batch(batch_size):
    images = torch.randn(batch_size, 3, 8 * SIZE, 8 * SIZE)
    return noised(
        torch.randn(batch_size, 4, SIZE, SIZE), torch.randn(batch_size, WORDS, 24), images
    )


def sample(generator):
    shapes = (4, SIZE, SIZE), (WORDS, 24), (3, 8 * SIZE, 8 * SIZE)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def dataset():
    return Samples(sample, 52)


def collate(samples):
    return noised(*map(torch.stack, zip(*samples, strict=True)))


def loss(output, target):
    return mse_loss(output.float(), target.float(), reduction="mean")


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=1e-2)


def scheduler(optimizer):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
