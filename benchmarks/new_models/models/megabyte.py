"""MEGABYTE: bytes within patches; the model returns its loss, which ignores the padding, 0."""

import torch
from made_up import Samples, padded_text
from MEGABYTE_pytorch import MEGABYTE
from schedules import by_factor, cosine_after_warm_up

BYTES, PATCHES, PATCH = 64, 6, 4


def build_model():
    return MEGABYTE(
        num_tokens=BYTES, dim=(32, 24), depth=(2, 2), max_seq_len=(PATCHES, PATCH), dim_head=8,
        heads=4, pad_id=0,
    )  # fmt: skip


def example_batch(batch_size):
    ids = torch.randint(1, BYTES, (batch_size, PATCHES * PATCH))
    return {"ids": ids, "return_loss": True}, None


def sample(generator):
    ids, _, _ = padded_text(generator, BYTES, PATCHES * PATCH)
    return ids


def collate(samples):
    return {"ids": torch.stack(samples), "return_loss": True}, None


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return output


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=2e-3)


def scheduler(optimizer):
    return by_factor(optimizer, cosine_after_warm_up())
