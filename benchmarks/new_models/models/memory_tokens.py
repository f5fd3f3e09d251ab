"""A decoder of x-transformers with memory tokens, learned positions, gated feedforwards and
normalised queries.
"""

import torch
from made_up import Samples
from torch.nn.functional import cross_entropy
from x_transformers import Decoder, TransformerWrapper

WORDS, LENGTH = 128, 20


def build_model():
    return TransformerWrapper(
        num_tokens=WORDS, max_seq_len=LENGTH, num_memory_tokens=4, use_abs_pos_emb=True,
        attn_layers=Decoder(
            dim=32, depth=3, heads=4, attn_dim_head=8, ff_glu=True, ff_swish=True,
            attn_qk_norm=True, use_rmsnorm=True, residual_attn=True,
        ),
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(0, WORDS, (batch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def sample(generator):
    tokens = torch.randint(0, WORDS, (LENGTH + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output.transpose(1, 2), target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
