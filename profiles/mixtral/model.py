"""A small Mixtral (Jiang et al. 2024): 6 layers of 8 experts, of which each token uses two, 64
tokens.

Needs `transformers` (pip install 'transformers>=4.50'); weights are random, nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 64  # tokens of a sample
VOCABULARY = 32000


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return _build(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
    )


def build_tiny() -> nn.Module:
    """Return a model of two layers, for experiments."""
    return _build(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def _build(**sizes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    # Named, so that the same attention kernel runs whether the model is traced or not.
    config = MixtralConfig(
        vocab_size=VOCABULARY, use_cache=False, attn_implementation="eager", **sizes
    )
    model: nn.Module = MixtralForCausalLM(config)
    return model


def example_batch(batch_size: int) -> tuple[tuple[()], dict[str, Tensor], None]:
    """Return random tokens; the model computes its loss itself."""
    tokens = torch.randint(0, VOCABULARY, (batch_size, LENGTH))
    return (), {"input_ids": tokens, "labels": tokens}, None


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01)
