"""An encoder and a decoder of x-transformers, which return their loss; both languages are
padded.
"""

import torch
from made_up import IGNORED, Samples, padded_text
from schedules import by_factor, linear_after_warm_up
from x_transformers import XTransformer

WORDS, LENGTH = 128, 16


def build_model():
    return XTransformer(
        dim=32, enc_num_tokens=WORDS, enc_depth=2, enc_heads=4, enc_max_seq_len=LENGTH,
        dec_num_tokens=WORDS, dec_depth=2, dec_heads=4, dec_max_seq_len=LENGTH,
        tie_token_emb=True, enc_attn_dim_head=8, dec_attn_dim_head=8, ignore_index=IGNORED,
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    mask = torch.ones_like(tokens).bool()
    return {"src": tokens, "tgt": tokens.flip(1), "mask": mask}, None


def sample(generator):
    source, mask, _ = padded_text(generator, WORDS, LENGTH)
    _, _, target = padded_text(generator, WORDS, LENGTH)
    return {"src": source, "tgt": target, "mask": mask.bool()}, None


def dataset():
    return Samples(sample, 48)  # the model is captured for one size of microbatches


def loss(output, target):
    return output


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.98), eps=1e-9)


def scheduler(optimizer):
    return by_factor(optimizer, linear_after_warm_up())
