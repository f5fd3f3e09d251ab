"""Falcon: linear biases for positions, one key for all heads, attention beside the feed-forward
part.
"""

import torch
from made_up import Samples, padded_text
from transformers import FalconConfig, FalconForCausalLM

WORDS, LENGTH = 256, 24


def build_model():
    return FalconForCausalLM(
        FalconConfig(
            vocab_size=WORDS, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, alibi=True,
            multi_query=True, parallel_attn=True, bias=True, use_cache=False, tie_word_embeddings=False,
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
