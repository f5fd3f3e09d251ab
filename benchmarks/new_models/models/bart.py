"""BART: an encoder and a decoder that share their embedding with the head; translations padded on
both sides.
"""

import torch
from made_up import Samples, padded_text
from transformers import BartConfig, BartForConditionalGeneration

WORDS, LENGTH = 128, 16


def build_model():
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, use_cache=False,
            max_position_embeddings=32,
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
    tokens, mask, _ = padded_text(generator, WORDS, LENGTH)
    _, _, labels = padded_text(generator, WORDS, LENGTH)
    return (), {"input_ids": tokens, "attention_mask": mask, "labels": labels}, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
