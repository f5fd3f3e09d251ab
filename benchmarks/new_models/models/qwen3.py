"""Qwen3: grouped queries, normalised queries and keys; texts of different lengths, padded."""

import torch
from made_up import Samples, padded_text
from transformers import Qwen3Config, Qwen3ForCausalLM

WORDS, LENGTH = 256, 24


def build_model():
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=WORDS, hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, use_cache=False, tie_word_embeddings=False,
        )
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    return (
        (),
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()},
        None,
    )


def sample(generator):
    tokens, mask, labels = padded_text(generator, WORDS, LENGTH)
    return (), {"input_ids": tokens, "attention_mask": mask, "labels": labels}, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
