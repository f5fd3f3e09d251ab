"""A small Llama (Touvron et al. 2023): 12 layers of width 768, grouped key-value heads, 128 tokens.

Needs `transformers` (pip install 'transformers>=4.50'); weights are random, nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 128  # tokens of a sample
VOCABULARY = 32000


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return _build(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
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
    from transformers import LlamaConfig, LlamaForCausalLM

    # Named, so that the same attention kernel runs whether the model is traced or not.
    config = LlamaConfig(
        vocab_size=VOCABULARY, use_cache=False, attn_implementation="eager", **sizes
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def example_batch(batch_size: int) -> tuple[tuple[()], dict[str, Tensor], None]:
    """Return random tokens; the model computes its loss itself."""
    tokens = torch.randint(0, VOCABULARY, (batch_size, LENGTH))
    return (), {"input_ids": tokens, "labels": tokens}, None


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01)
