"""ALBERT: all layers share their weights. Masked words of padded texts; LAMB, whose norms are of
whole parameters.
"""

import torch
from made_up import IGNORED, Samples, padded_text
from pytorch_optimizer import Lamb
from schedules import by_factor, linear_after_warm_up, matrices_decay
from transformers import AlbertConfig, AlbertForMaskedLM

WORDS, LENGTH, MASK = 200, 24, 199


def build_model():
    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=WORDS, embedding_size=24, hidden_size=48, num_hidden_layers=4,
            num_attention_heads=4, intermediate_size=96, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(1, MASK, (batch_size, LENGTH))
    labels = tokens.where(torch.rand(tokens.shape) < 0.3, IGNORED)
    arguments = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return (), arguments, None


def sample(generator):
    tokens, mask, labels = padded_text(generator, MASK, LENGTH)
    masked = torch.rand(LENGTH, generator=generator) < 0.3
    masked[0] = True  # no text is without a label
    inputs = tokens.where(~masked | (mask == 0), MASK)
    arguments = {
        "input_ids": inputs,
        "attention_mask": mask,
        "labels": labels.where(masked, IGNORED),
    }
    return (), arguments, None


def dataset():
    return Samples(sample, 52)


def optimizer(named_parameters):
    return Lamb(matrices_decay(named_parameters, 0.01), lr=5e-3)


def scheduler(optimizer):
    return by_factor(optimizer, linear_after_warm_up())
