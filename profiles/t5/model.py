"""T5-small (Raffel et al. 2020): encoder and decoder of 6 layers, 60 million parameters, 64 tokens
each.

Needs `transformers` (pip install 'transformers>=4.50'); weights are random, nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 64  # tokens of a sample
VOCABULARY = 32128


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return _build(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8)


def build_tiny() -> nn.Module:
    """Return a model of two layers, for experiments."""
    return _build(d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2)


def _build(**sizes: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    # Named, so that the same attention kernel runs whether the model is traced or not.
    config = T5Config(
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation="eager",
        **sizes,
    )
    model: nn.Module = T5ForConditionalGeneration(config)
    return model


def example_batch(batch_size: int) -> tuple[tuple[()], dict[str, Tensor], None]:
    """Return random tokens; the model computes its loss itself."""
    source, target = (torch.randint(0, VOCABULARY, (batch_size, LENGTH)) for _ in range(2))
    return (), {"input_ids": source, "labels": target}, None


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01)
