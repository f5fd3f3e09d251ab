"""Longformer: windows, and one word that attends to all; words are tagged, and those within words have no tag."""

import torch
from made_up import IGNORED, Samples, padded_text
from schedules import by_factor, linear_after_warm_up
from transformers import LongformerConfig, LongformerForTokenClassification

WORDS, LENGTH, TAGS = 200, 32, 5


def build_model():
    return LongformerForTokenClassification(
        LongformerConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=64, attention_window=8, max_position_embeddings=LENGTH + 2,
            num_labels=TAGS, pad_token_id=0, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    everywhere = torch.zeros_like(tokens)
    everywhere[:, 0] = 1
    arguments = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "global_attention_mask": everywhere,
        "labels": torch.randint(0, TAGS, tokens.shape),
    }
    return (), arguments, None


def sample(generator):
    tokens, mask, _ = padded_text(generator, WORDS, LENGTH)
    begins = (torch.rand(LENGTH, generator=generator) < 0.6) & (mask == 1)
    begins[1] = True
    tags = torch.randint(0, TAGS, (LENGTH,), generator=generator).where(begins, IGNORED)
    everywhere = torch.zeros_like(tokens)
    everywhere[0] = 1
    arguments = {
        "input_ids": tokens,
        "attention_mask": mask,
        "global_attention_mask": everywhere,
        "labels": tags,
    }
    return (), arguments, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def scheduler(optimizer):
    return by_factor(optimizer, linear_after_warm_up())
