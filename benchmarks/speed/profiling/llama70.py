"""Llama 2 70B (Touvron et al. 2023), built from its configuration."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def build_model() -> nn.Module:
    """Return a model of 80 layers of width 8192 with grouped-query attention."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def example_batch(batch_size: int) -> tuple[tuple[()], dict[str, Tensor], None]:
    """Return random tokens, which are also the labels."""
    tokens = torch.randint(0, 32000, (batch_size, 2048))
    return (), {"input_ids": tokens, "labels": tokens}, None
