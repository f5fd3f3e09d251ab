"""VideoMAE: nine tenths of a film's patches are hidden, the same number in every film, and are
reconstructed.

The model indexes by the mask, so sizes depend on values, and the file names the blocks.
"""

import torch
from made_up import Samples
from schedules import by_factor, cosine_after_warm_up
from torch import nn
from torch.nn.functional import mse_loss
from transformers import VideoMAEConfig, VideoMAEForPreTraining

FRAMES, SIZE, PATCH, PATCHES, HIDDEN = 4, 32, 8, 32, 24


def build_model():
    return VideoMAEForPreTraining(
        VideoMAEConfig(
            image_size=SIZE, patch_size=PATCH, num_frames=FRAMES, tubelet_size=2, hidden_size=32,
            num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
            decoder_hidden_size=24, decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
            decoder_intermediate_size=48, norm_pix_loss=False,
        )
    )  # fmt: skip


class Front(nn.Module):
    """From films to the patches that are seen, in one size."""

    def __init__(self, model):
        super().__init__()
        self.embeddings = model.videomae.embeddings

    def forward(self, pixel_values, bool_masked_pos):
        return self.embeddings(pixel_values, bool_masked_pos), pixel_values, bool_masked_pos


class Passing(nn.Module):
    """A layer, and what later blocks need."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, values):
        hidden, pixels, mask = values
        return self.layer(hidden), pixels, mask


class Tail(nn.Module):
    """The decoder and the loss, as VideoMAEForPreTraining has them."""

    def __init__(self, model):
        super().__init__()
        self.narrow = model.encoder_to_decoder
        self.mask_token, self.decoder = model.mask_token, model.decoder
        self.places = model.position_embeddings

    def forward(self, values):
        hidden, pixels, mask = values
        hidden = self.narrow(hidden)
        films, _, width = hidden.shape
        places = self.places.expand(films, -1, -1)
        seen = places[~mask].reshape(films, -1, width)
        unseen = places[mask].reshape(films, -1, width)
        patches = torch.cat([hidden + seen, self.mask_token + unseen], 1)
        logits = self.decoder(patches, unseen.shape[1]).logits
        return {"loss": mse_loss(logits, hidden_patches(pixels, mask))}


def hidden_patches(pixels, mask):
    mean = pixels.new_tensor([0.485, 0.456, 0.406])[:, None, None]
    deviation = pixels.new_tensor([0.229, 0.224, 0.225])[:, None, None]
    frames = pixels * deviation + mean
    parts = frames.unflatten(3, (-1, PATCH)).unflatten(5, (-1, PATCH)).unflatten(1, (-1, 2))
    patches = parts.permute(0, 1, 4, 6, 2, 5, 7, 3).flatten(4).flatten(1, 3)
    return patches[mask].reshape(len(pixels), -1, patches.shape[-1])


def blocks(model):
    layers = [Passing(layer) for layer in model.videomae.encoder.layer]
    return [Front(model), *layers, Tail(model)]


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
