"""ModernBERT: windows and whole attention in turn; StableAdamW, and the schedule that stays before
it falls.
"""

import torch
from made_up import IGNORED, Samples, padded_text
from pytorch_optimizer import StableAdamW
from schedules import by_factor, matrices_decay, trapezoid
from transformers import ModernBertConfig, ModernBertForMaskedLM

WORDS, LENGTH, MASK = 200, 24, 199


def build_model():
    return ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=WORDS, hidden_size=48, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=LENGTH, local_attention=8,
            global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            cls_token_id=1, sep_token_id=2, reference_compile=False, attn_implementation="sdpa",
        )
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(3, MASK, (batch_size, LENGTH))
    labels = tokens.where(torch.rand(tokens.shape) < 0.3, IGNORED)
    arguments = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return (), arguments, None


def sample(generator):
    tokens, mask, labels = padded_text(generator, MASK, LENGTH)
    masked = torch.rand(LENGTH, generator=generator) < 0.3
    masked[0] = True
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
    return StableAdamW(matrices_decay(named_parameters, 1e-2), lr=2e-3, betas=(0.9, 0.98))


def scheduler(optimizer):
    return by_factor(optimizer, trapezoid())
