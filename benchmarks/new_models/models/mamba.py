"""Mamba: a state space whose scan is a loop over the sequence; weights of embedding and head are
tied.
"""

import torch
from made_up import Samples, padded_text
from transformers import MambaConfig, MambaForCausalLM

WORDS, LENGTH = 128, 12


def build_model():
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=WORDS, hidden_size=32, state_size=4, num_hidden_layers=4, use_cache=False
        )
    )


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    return (), {"input_ids": tokens, "labels": tokens.clone()}, None


def sample(generator):
    tokens, _, labels = padded_text(generator, WORDS, LENGTH)
    return (), {"input_ids": tokens, "labels": labels}, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
