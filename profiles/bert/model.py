"""BERT-base for masked words (Devlin et al. 2019): 12 layers, 110 million parameters, 128 tokens.

Needs `transformers` (pip install 'transformers>=4.50'); weights are random, nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 128  # tokens of a sample
VOCABULARY = 30522


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return _build()


def build_tiny() -> nn.Module:
    """Return a model of two layers, for experiments."""
    return _build(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)


def _build(**sizes: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    # Named, so that the same attention kernel runs whether the model is traced or not.
    config = BertConfig(vocab_size=VOCABULARY, attn_implementation="eager", **sizes)
    model: nn.Module = BertForMaskedLM(config)
    return model


def example_batch(batch_size: int) -> tuple[tuple[()], dict[str, Tensor], None]:
    """Return random tokens; the model computes its loss itself."""
    tokens = torch.randint(0, VOCABULARY, (batch_size, LENGTH))
    # The model guesses one word in seven; -100 marks words that are no target.
    labels = tokens.where(torch.rand(tokens.shape) < 0.15, torch.tensor(-100))
    return (
        (),
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels},
        None,
    )


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01)
