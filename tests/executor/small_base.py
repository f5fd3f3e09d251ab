"""A small language model in a folder, as the hub leaves one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


def make_base(folder: Path) -> None:
    """Write a small base, whose tensors are in several files, a tokenizer of bytes, and a text."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    letters = enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: i for i, letter in letters}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
        folder / "base"
    )
    torch.manual_seed(1)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    base.save_pretrained(folder / "base", max_shard_size="60KB")
    assert len(list((folder / "base").glob("*.safetensors"))) > 2
    (folder / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog. " * 30, encoding="utf-8"
    )
