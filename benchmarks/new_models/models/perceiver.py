"""Perceiver: bytes are read by a few latent vectors, whose blocks share their weights."""

import torch
from made_up import Samples
from torch.nn.functional import cross_entropy
from transformers import PerceiverConfig, PerceiverForSequenceClassification

LENGTH, CLASSES = 40, 5


def build_model():
    return PerceiverForSequenceClassification(
        PerceiverConfig(
            num_latents=12, d_latents=32, d_model=24, num_blocks=2, num_self_attends_per_block=2, vocab_size=262,
            num_self_attention_heads=4, num_cross_attention_heads=2, attention_probs_dropout_prob=0.0,
            max_position_embeddings=LENGTH, num_labels=CLASSES,
        )
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(6, 262, (batch_size, LENGTH))
    return (tokens, torch.ones_like(tokens)), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    tokens = torch.randint(6, 262, (LENGTH,), generator=generator)
    mask = torch.arange(LENGTH) < int(torch.randint(4, LENGTH, (), generator=generator))
    return (tokens, mask.long()), torch.randint(0, CLASSES, (), generator=generator)


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output.logits, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
