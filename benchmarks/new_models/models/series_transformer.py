"""The time series transformer: the loss is a likelihood over the values that were observed.

The model's distributions check their arguments, which decides by values: they are told not to.
"""

import torch
from made_up import Samples
from schedules import by_factor, cosine_after_warm_up
from torch.distributions import Distribution
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

Distribution.set_default_validate_args(False)

PAST, FUTURE, LAGS, KNOWN = 20, 6, [1, 2, 3], 2


def build_model():
    return TimeSeriesTransformerForPrediction(
        TimeSeriesTransformerConfig(
            prediction_length=FUTURE, context_length=PAST - max(LAGS), lags_sequence=LAGS,
            distribution_output="normal", num_time_features=KNOWN, d_model=24, encoder_layers=2,
            decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def arguments(series, times, observed):
    return {
        "past_values": series[..., :PAST],
        "past_time_features": times[..., :PAST, :],
        "past_observed_mask": observed[..., :PAST],
        "future_values": series[..., PAST:],
        "future_time_features": times[..., PAST:, :],
        "future_observed_mask": observed[..., PAST:],
    }


def example_batch(batch_size):
    series = torch.randn(batch_size, PAST + FUTURE)
    times = torch.randn(batch_size, PAST + FUTURE, KNOWN)
    return (), arguments(series, times, torch.ones_like(series)), None


def sample(generator):
    series = torch.randn(PAST + FUTURE, generator=generator).cumsum(0)
    times = torch.randn(PAST + FUTURE, KNOWN, generator=generator)
    observed = (torch.rand(PAST + FUTURE, generator=generator) < 0.7).float()
    observed[PAST] = 1
    return (), arguments(series, times, observed), None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=6e-4, betas=(0.9, 0.95), weight_decay=1e-1)


def scheduler(optimizer):
    return by_factor(optimizer, cosine_after_warm_up())
