"""Models by name: the configurations that transformers builds, without their weights.

Sizes are those of the published config.json files on the Hugging Face hub, and of the papers:

    gpt2        Radford et al. 2019, table 2
    bert        Devlin et al. 2019, section 3
    t5          Raffel et al. 2020, section 3.7
    vit         Dosovitskiy et al. 2021, table 1
    gpt-neox    Black et al. 2022, table 1
    llama       Touvron et al. 2023 (Llama 2), table 1; Llama team 2024 (Llama 3), table 3
    mistral     Jiang et al. 2023, table 1
    qwen2.5     Qwen team 2024, table 1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def _gpt2(width: int, layers: int, heads: int) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
    }


def _bert(width: int, layers: int, heads: int) -> Config:
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def _t5(width: int, layers: int, heads: int) -> Config:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": width,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_heads": heads,
    }


def _vit(width: int, layers: int, heads: int, patch: int) -> Config:
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "patch_size": patch,
    }


def _llama(width: int, inner: int, layers: int, heads: int, groups: int, words: int = 32000) -> Config:
    """Return a Llama: `groups` of heads share keys and values, and `words` are in the vocabulary."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": words,
        "max_position_embeddings": 4096 if words == 32000 else 8192,
    }


def _like_llama(kind: str, config: Config) -> Config:
    return {**config, "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}


MODELS: Mapping[str, Config] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "t5-base": _t5(768, 12, 12),
    "t5-large": _t5(1024, 24, 16),
    "vit-large": _vit(1024, 24, 16, 16),
    "vit-huge": _vit(1280, 32, 16, 14),
    "gpt-neox-20b": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "vocab_size": 50432,
    },
    "llama-7b": _llama(4096, 11008, 32, 32, 32),
    "llama-13b": _llama(5120, 13824, 40, 40, 40),
    "llama-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "mistral-7b": _like_llama("Mistral", _llama(4096, 14336, 32, 32, 8)),
    "qwen2.5-7b": _like_llama("Qwen2", _llama(3584, 18944, 28, 28, 4, 152064)),
    "qwen2.5-72b": _like_llama("Qwen2", _llama(8192, 29568, 80, 64, 8, 152064)),
}
