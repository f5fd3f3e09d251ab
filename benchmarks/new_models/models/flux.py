"""Flux's transformer of diffusers: image and text in two streams, then in one; trained by flow
matching.
"""

import torch
from diffusers import FluxTransformer2DModel
from made_up import Samples
from torch import nn
from torch.nn.functional import mse_loss

TOKENS, WORDS = 16, 8


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = FluxTransformer2DModel(
            patch_size=1, in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
        self.register_buffer(
            "places", torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
        )
        self.register_buffer("words", torch.zeros(WORDS, 3))

    def forward(self, image, noise, time, text, pooled):
        mixed = torch.lerp(image, noise, time[:, None, None])
        return self.transformer(
            mixed, encoder_hidden_states=text, pooled_projections=pooled, timestep=time, img_ids=self.places,
            txt_ids=self.words, return_dict=False,
        )[0]  # fmt: skip


def build_model():
    return Flow()


def _sample(shape, generator=None):
    def draw(*sizes):
        return torch.randn(*shape, *sizes, generator=generator)

    image, noise = draw(TOKENS, 8), draw(TOKENS, 8)
    time = torch.rand(shape, generator=generator)
    return (image, noise, time, draw(WORDS, 24), draw(20)), noise - image


def example_batch(batch_size):
    return _sample((batch_size,))


def sample(generator):
    return _sample((), generator)


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return mse_loss(output, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
