"""PatchTST: several series, scaled by their own mean and deviation, forecast from patches."""

import torch
from made_up import Samples
from transformers import PatchTSTConfig, PatchTSTForPrediction


def build_model():
    return PatchTSTForPrediction(
        PatchTSTConfig(
            num_input_channels=3, context_length=48, prediction_length=12, patch_length=8, patch_stride=8, d_model=32,
            num_attention_heads=4, num_hidden_layers=3, ffn_dim=64, loss="mse", head_dropout=0.0, norm_type="layernorm",
        )
    )  # fmt: skip


def example_batch(batch_size):
    past, future = torch.randn(batch_size, 48, 3), torch.randn(batch_size, 12, 3)
    return (), {"past_values": past, "future_values": future}, None


def sample(generator):
    series = torch.randn(60, 3, generator=generator).cumsum(0)
    return (), {"past_values": series[:48], "future_values": series[48:]}, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
