"""Models by name, as transformers builds them without their weights: find a configuration, and write its model file.

Sizes are those of the published config.json files on the Hugging Face hub, and of the papers:

    gpt2        Radford et al. 2019, table 2
    bert        Devlin et al. 2019, section 3
    t5          Raffel et al. 2020, section 3.7
    vit         Dosovitskiy et al. 2021, table 1; Zhai et al. 2022, table 2
    gpt-neox    Black et al. 2022, table 1
    llama       Touvron et al. 2023 (Llama 2), table 1; Llama team 2024 (Llama 3), table 3
    mistral     Jiang et al. 2023, table 1; mixtral: Jiang et al. 2024, table 1
    qwen2.5     Qwen team 2024, table 1; qwen3: Qwen team 2025, tables 1 and 2
    gemma       Gemma team 2024, table 1; gemma-2: Gemma team 2024, table 1
    deepseek    DeepSeek-AI 2024 (V2), appendix B
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from planner.errors import InputError, did_you_mean
from planner.formats.files import write_text

Config = Mapping[str, Any]
_BERT = "hidden_size num_hidden_layers num_attention_heads intermediate_size"
_LLAMA = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size "
    "max_position_embeddings"
)
_KINDS = {  # by model_type: the class, and the fields of a configuration that say its size
    "gpt2": ("GPT2LMHeadModel", "n_embd n_layer n_head"),
    "bert": ("BertForMaskedLM", _BERT),
    "t5": ("T5ForConditionalGeneration", "d_model d_ff num_layers num_heads d_kv decoder_start_token_id"),
    "vit": ("ViTForImageClassification", f"{_BERT} patch_size"),
    "gpt_neox": ("GPTNeoXForCausalLM", f"{_BERT} vocab_size"),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": ("MistralForCausalLM", _LLAMA),
    "mixtral": ("MixtralForCausalLM", f"{_LLAMA} num_local_experts num_experts_per_tok"),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", f"{_LLAMA} head_dim"),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        f"{_LLAMA} head_dim num_experts num_experts_per_tok moe_intermediate_size",
    ),
    "gemma": ("GemmaForCausalLM", f"{_LLAMA} head_dim"),
    "gemma2": ("Gemma2ForCausalLM", f"{_LLAMA} head_dim"),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        f"{_LLAMA} n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts first_k_dense_replace "
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    ),
}


def _config(kind: str, *sizes: int, **more: Any) -> Config:
    name, fields = _KINDS[kind]
    return {"architectures": [name], "model_type": kind, **dict(zip(fields.split(), sizes, strict=True)), **more}


MODELS: Mapping[str, Config] = {
    "gpt2": _config("gpt2", 768, 12, 12),
    "gpt2-medium": _config("gpt2", 1024, 24, 16),
    "gpt2-large": _config("gpt2", 1280, 36, 20),
    "gpt2-xl": _config("gpt2", 1600, 48, 25),
    "bert-base": _config("bert", 768, 12, 12, 3072),
    "bert-large": _config("bert", 1024, 24, 16, 4096),
    "t5-base": _config("t5", 768, 3072, 12, 12, 64, 0),
    "t5-large": _config("t5", 1024, 4096, 24, 16, 64, 0),
    "t5-3b": _config("t5", 1024, 16384, 24, 32, 128, 0),
    "t5-11b": _config("t5", 1024, 65536, 24, 128, 128, 0),
    "vit-large": _config("vit", 1024, 24, 16, 4096, 16),
    "vit-huge": _config("vit", 1280, 32, 16, 5120, 14),
    "vit-g": _config("vit", 1408, 40, 16, 6144, 14),
    "gpt-neox-20b": _config("gpt_neox", 6144, 44, 64, 24576, 50432),
    "llama-7b": _config("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-13b": _config("llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-70b": _config("llama", 8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3-8b": _config("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256, 8192),
    "llama-3-405b": _config("llama", 16384, 53248, 126, 128, 8, 128256, 8192),
    "mistral-7b": _config("mistral", 4096, 14336, 32, 32, 8, 32000, 4096),
    "qwen2.5-7b": _config("qwen2", 3584, 18944, 28, 28, 4, 152064, 8192),
    "qwen2.5-72b": _config("qwen2", 8192, 29568, 80, 64, 8, 152064, 8192),
    "qwen3-0.6b": _config("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, 128, tie_word_embeddings=True),
    "qwen3-1.7b": _config("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, 128, tie_word_embeddings=True),
    "qwen3-4b": _config("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, 128, tie_word_embeddings=True),
    "qwen3-8b": _config("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, 128),
    "qwen3-14b": _config("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, 128),
    "qwen3-32b": _config("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, 128),
    "qwen3-30b-a3b": _config("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, 128, 128, 8, 768),
    "mixtral-8x7b": _config("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, 8, 2),
    "gemma-2b": _config("gemma", 2048, 16384, 18, 8, 1, 256000, 8192, 256),
    "gemma-7b": _config("gemma", 3072, 24576, 28, 16, 16, 256000, 8192, 256),
    "gemma-2-9b": _config("gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, 256),
    "gemma-2-27b": _config("gemma2", 4608, 36864, 46, 32, 16, 256000, 8192, 128),
    "deepseek-v2-lite": _config(
        "deepseek_v2", 2048, 10944, 27, 16, 16, 102400, 163840, 64, 6, 1408, 2, 1, 512, 128, 64, 128, q_lora_rank=None
    ),
}
# Other names of the same sizes, by line; llama-3.1 differs from llama-3 in its rotary embedding alone.
ALIASES: Mapping[str, str] = {
    **{f"llama-2-{size}": f"llama-{size}" for size in ("7b", "13b", "70b")},
    **{f"llama-3.1-{size}": f"llama-3-{size}" for size in ("8b", "70b", "405b")},
    "llama-3.3-70b": "llama-3-70b",
    "vit-giant": "vit-g",
    "gpt2-small": "gpt2",
}
# What names on a hub have besides: "meta-llama/Llama-3.1-8B-Instruct", "google/vit-large-patch16-224".
_BESIDES = re.compile(r"^(.*/)?(meta-(?=llama))?|-(hf|base|instruct|chat|it|pt|v0\.\d|v1|(un)?cased|patch\d.*)(?=-|$)")


LENGTH = 2048  # tokens of a sample, where the model takes as many
_LENGTHS = ("max_position_embeddings", "n_positions")  # in configurations: tokens that a model takes
_TEMPLATE = "transformers_model.py"
_INSTALL = "pip install 'transformers>=4.50'"


@dataclass(frozen=True)
class NamedModel:
    """A model of transformers, whose file is yet to be written."""

    name: str  # also of its folder
    config: Config  # as transformers writes it to config.json, with `architectures` and `model_type`

    def tokens(self, asked: int | None) -> int | None:
        """Return the tokens of a sample, asked for or up to 2,048; None for images; raise InputError for too many."""
        with _transformers(self.name) as transformers:
            full = transformers.AutoConfig.for_model(**self.config)
        if hasattr(full, "image_size"):
            return None
        limits = [limit for name in _LENGTHS if isinstance(limit := getattr(full, name, None), int)]
        most = min(limits, default=None)
        if asked is not None and most is not None and asked > most:
            raise InputError(f"{self.name} takes at most {most} tokens, not {asked}", hint=f"give `length={most}`")
        return asked or min(LENGTH, most or LENGTH)

    def write(self, folder: Path, tokens: int | None) -> Path:
        """Write config.json and model.py, whose path is returned; raise InputError where another model is."""
        line = f"LENGTH = {LENGTH}  #"
        template = resources.files("planner.catalog").joinpath(_TEMPLATE).read_text(encoding="utf-8")
        texts = {
            "config.json": json.dumps(self.config, indent=1) + "\n",
            "model.py": template.replace(line, line.replace(str(LENGTH), str(tokens or LENGTH))),
        }
        for name, text in texts.items():
            if (path := folder / name).exists() and path.read_text(encoding="utf-8", errors="replace") != text:
                raise InputError(f"'{path}' is of another model", hint="choose a folder with `output`")
        for name, text in texts.items():
            write_text(folder / name, text)
        return folder / "model.py"


def find_model(name: str) -> NamedModel:
    """Return the model of a name in `MODELS`, a class of transformers or a config.json; raise InputError for others."""
    plain = name.lower() if name.lower() in MODELS else _BESIDES.sub("", name.lower().replace("_", "-"))
    if name.endswith(".json"):
        found = _of_file(Path(name))
    elif (config := MODELS.get(ALIASES.get(plain, plain))) is not None:
        found = NamedModel(plain, config)
    else:
        made_from = None
        if name.isidentifier() and name[:1].isupper():
            with _transformers(name) as transformers:
                made_from = getattr(getattr(transformers, name, None), "config_class", None)
        if made_from is None:
            raise InputError(
                f"there is no model '{name}'",
                hint=f"{did_you_mean(plain, [*MODELS, *ALIASES])}Give a model file, a config.json, a class of "
                f"transformers such as LlamaForCausalLM, or one of {', '.join(MODELS)}",
            )
        found = NamedModel(name, {"architectures": [name], "model_type": made_from.model_type})
    with _transformers(found.name) as transformers:
        if not hasattr(transformers, found.config["architectures"][0]):
            raise ValueError(f"it has no class {found.config['architectures'][0]}")
    return found


def _of_file(path: Path) -> NamedModel:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise InputError(f"'{path}' cannot be read as JSON: {cause}", hint="name a config.json") from None
    for field in ("architectures", "model_type"):
        if not isinstance(config, dict) or not config.get(field):
            raise InputError(
                f"'{path}' has no field '{field}', so it does not say which model it is",
                hint='a config.json of transformers has, such as "architectures": ["LlamaForCausalLM"]',
            )
    return NamedModel(path.resolve().parent.name if path.stem == "config" else path.stem, config)


@contextmanager
def _transformers(name: str) -> Iterator[Any]:
    """Import transformers, and say in one sentence what it says in many where it cannot load a model."""
    if find_spec("transformers") is None:
        raise InputError(f"'{name}' is built by transformers, which is not installed", hint=_INSTALL)
    try:
        yield import_module("transformers")
    except (ImportError, RuntimeError, ValueError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise InputError(
            f"transformers cannot load '{name}': {str(cause).splitlines()[0].partition('. ')[0]}",
            hint="the name may be of another version of transformers, or torchvision of another build than torch",
        ) from error
