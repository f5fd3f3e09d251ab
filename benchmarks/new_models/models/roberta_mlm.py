"""RoBERTa: other words are masked whenever a text is read, by `collate`, as transformers' collator
does.
"""

import torch
from made_up import IGNORED, Samples, padded_text
from schedules import by_factor, linear_after_warm_up, matrices_decay
from transformers import RobertaConfig, RobertaForMaskedLM

WORDS, LENGTH, PADDING, MASK = 200, 24, 0, 199


def build_model():
    return RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=WORDS, hidden_size=48, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=96, max_position_embeddings=LENGTH + 2, pad_token_id=PADDING,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def example_batch(batch_size):
    return masked(torch.randint(1, MASK, (batch_size, LENGTH)))


def masked(tokens):
    """Choose 15% of the words: 80% of them are masked, and 10% become others."""
    chosen = (torch.rand(tokens.shape) < 0.15) & (tokens != PADDING)
    labels = tokens.where(chosen, IGNORED)
    hidden = chosen & (torch.rand(tokens.shape) < 0.8)
    other = chosen & ~hidden & (torch.rand(tokens.shape) < 0.5)
    inputs = tokens.where(~hidden, MASK).where(~other, torch.randint(1, MASK, tokens.shape))
    arguments = {
        "input_ids": inputs,
        "attention_mask": (tokens != PADDING).long(),
        "labels": labels,
    }
    return (), arguments, None


def sample(generator):
    tokens, _, _ = padded_text(generator, MASK, LENGTH)
    return tokens


def dataset():
    return Samples(sample, 52)


def collate(samples):
    return masked(torch.stack(samples))


def optimizer(named_parameters):
    groups = matrices_decay(named_parameters, 0.01)
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), eps=1e-6)


def scheduler(optimizer):
    return by_factor(optimizer, linear_after_warm_up())
