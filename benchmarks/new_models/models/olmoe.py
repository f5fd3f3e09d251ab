"""OLMoE: each token goes to 2 of 8 experts, with a loss that balances them."""

import torch
from made_up import Samples, padded_text
from transformers import OlmoeConfig, OlmoeForCausalLM

WORDS, LENGTH = 256, 16


def build_model():
    return OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_experts=8, num_experts_per_tok=2, use_cache=False, output_router_logits=False,
        )
    )  # fmt: skip


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
