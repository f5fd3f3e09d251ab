"""iTransformer: attention between variates of a series, hyper-connections, and its loss for two
horizons inside.
"""

import torch
from iTransformer import iTransformer
from made_up import Samples
from torch import nn

VARIATES, PAST, HORIZONS = 6, 24, (4, 8)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = iTransformer(
            num_variates=VARIATES, lookback_len=PAST, dim=32, depth=3, heads=4, dim_head=8, pred_length=HORIZONS,
            num_residual_streams=1,
        )  # fmt: skip

    def forward(self, past):
        return self.model(past)


def build_model():
    return Forecaster()


def example_batch(batch_size):
    return torch.randn(batch_size, PAST, VARIATES), tuple(
        torch.randn(batch_size, h, VARIATES) for h in HORIZONS
    )


def sample(generator):
    series = torch.randn(PAST + max(HORIZONS), VARIATES, generator=generator).cumsum(0)
    return series[:PAST], tuple(series[PAST : PAST + horizon] for horizon in HORIZONS)


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return sum(
        (output[h] - future).square().mean() for h, future in zip(HORIZONS, target, strict=True)
    )


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
