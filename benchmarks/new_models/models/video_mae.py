"""VideoMAE: nine tenths of a film's patches are hidden, the same number in every film, and are reconstructed."""

import torch
from made_up import Samples
from schedules import by_factor, cosine_after_warm_up
from transformers import VideoMAEConfig, VideoMAEForPreTraining

FRAMES, SIZE, PATCHES, HIDDEN = 4, 32, 32, 24


def build_model():
    return VideoMAEForPreTraining(
        VideoMAEConfig(
            image_size=SIZE, patch_size=8, num_frames=FRAMES, tubelet_size=2, hidden_size=32,
            num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
            decoder_hidden_size=24, decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
            decoder_intermediate_size=48, norm_pix_loss=False,
        )
    )  # fmt: skip


def example_batch(batch_size):
    hidden = torch.rand(batch_size, PATCHES).argsort(1) < HIDDEN
    films = torch.randn(batch_size, FRAMES, 3, SIZE, SIZE)
    return (), {"pixel_values": films, "bool_masked_pos": hidden}, None


def sample(generator):
    hidden = torch.rand(PATCHES, generator=generator).argsort() < HIDDEN
    film = torch.randn(FRAMES, 3, SIZE, SIZE, generator=generator)
    return (), {"pixel_values": film, "bool_masked_pos": hidden}, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05)


def scheduler(optimizer):
    return by_factor(optimizer, cosine_after_warm_up())
