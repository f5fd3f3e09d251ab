"""Reformer: hashed attention, and reversible layers that recompute their inputs in a function of
their own.
"""

import torch
from made_up import Samples
from torch.nn.functional import cross_entropy
from transformers import ReformerConfig, ReformerModelWithLMHead

WORDS, LENGTH = 64, 16


def build_model():
    return ReformerModelWithLMHead(
        ReformerConfig(
            vocab_size=WORDS, attention_head_size=8, hidden_size=32, num_attention_heads=4, feed_forward_size=48,
            attn_layers=["local", "lsh", "local"], num_buckets=4, num_hashes=1, lsh_attn_chunk_length=4,
            local_attn_chunk_length=4, axial_pos_shape=(4, 4), axial_pos_embds_dim=(16, 16), is_decoder=True,
            hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0, hash_seed=1, use_cache=False,
            max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def sample(generator):
    tokens = torch.randint(1, WORDS, (LENGTH + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
