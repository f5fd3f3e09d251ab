"""Whisper: an encoder of spectrograms, a decoder of text; labels are shifted by the model and
padded with -100.
"""

import torch
from made_up import Samples, padded_text
from schedules import by_factor, linear_after_warm_up
from transformers import WhisperConfig, WhisperForConditionalGeneration

WORDS, LENGTH, BANDS, FRAMES = 200, 12, 16, 40


def build_model():
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
            decoder_ffn_dim=64, num_mel_bins=BANDS, max_source_positions=FRAMES // 2,
            max_target_positions=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, use_cache=False, dropout=0.0,
        )
    )  # fmt: skip


def example_batch(batch_size):
    labels = torch.randint(3, WORDS, (batch_size, LENGTH))
    return (), {"input_features": torch.randn(batch_size, BANDS, FRAMES), "labels": labels}, None


def sample(generator):
    _, _, labels = padded_text(generator, WORDS, LENGTH)
    features = torch.randn(BANDS, FRAMES, generator=generator)
    return (), {"input_features": features, "labels": labels}, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), eps=1e-6)


def scheduler(optimizer):
    return by_factor(optimizer, linear_after_warm_up())
