"""Transformers of 3.6 to 70 billion parameters, in the shapes that were published."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_truth.gpt import Gpt
from planner.model.spec import TrainingSpec

LENGTH = 2048  # tokens of a sample


@dataclass(frozen=True)
class Llama:
    """A Llama 2 (Touvron et al. 2023), as Hugging Face's transformers builds it."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    key_value_heads: int

    def training_spec(self) -> TrainingSpec:
        """Return the model with AdamW and batches of random tokens; it computes its loss itself."""
        functions: dict[str, Callable[..., Any]] = {
            "build_model": self._build,
            "example_batch": _batch,
            "optimizer": _adamw,
        }
        return TrainingSpec(self.name, functions)

    def _build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=self.hidden,
                intermediate_size=self.ffn,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.key_value_heads,
                vocab_size=32000,
                use_cache=False,
            )
        )
        return model


def _batch(batch_size: int) -> tuple[tuple[()], dict[str, Tensor], None]:
    tokens = torch.zeros(batch_size, LENGTH, dtype=torch.long)
    return (), {"input_ids": tokens, "labels": tokens}, None


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _gpt(billion: float, layers: int, hidden: int, heads: int) -> Gpt:
    return Gpt(f"gpt-{billion:g}b", layers, hidden, heads, 4 * hidden, 51200, LENGTH, dropout=0.1)


# Shapes of the anchors' GPTs (vtrain-multi.csv) and of Llama 2.
MODELS: dict[str, Llama | Gpt] = {
    each.name: each
    for each in (
        _gpt(3.6, 30, 3072, 32),
        _gpt(18.4, 40, 6144, 48),
        _gpt(39.1, 48, 8192, 64),
        Llama("llama-7b", 32, 4096, 11008, 32, 32),
        Llama("llama-70b", 80, 8192, 28672, 64, 8),
    )
}
