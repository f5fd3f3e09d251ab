"""Models by name, as transformers builds them without their weights: find a configuration, and write its model file.

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

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from planner.errors import InputError
from planner.formats.files import write_text

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


LENGTH = 2048  # tokens of a sample, where the model takes as many
_LENGTHS = ("max_position_embeddings", "n_positions")  # in configurations: tokens that a model takes
_TEMPLATE = "transformers_model.py"
_INSTALL = "pip install 'transformers>=4.50'"


@dataclass(frozen=True)
class NamedModel:
    """A model of transformers, whose file is yet to be written.

    Attributes:
        name: of the model and of its folder.
        config: as transformers writes it to config.json, with `architectures` and `model_type`.
    """

    name: str
    config: Config

    def tokens(self, asked: int | None) -> int | None:
        """Return the tokens of a sample: as many as are asked for, or 2,048, or fewer where the model takes no more.

        Returns:
            None for a model of images.

        Raises:
            InputError: for more tokens than the model takes.
        """
        import transformers

        with _told(self.name):
            full = transformers.AutoConfig.for_model(**self.config)
        if hasattr(full, "image_size"):
            return None
        limits = [limit for name in _LENGTHS if isinstance(limit := getattr(full, name, None), int)]
        most = min(limits, default=None)
        if asked is not None and most is not None and asked > most:
            raise InputError(f"{self.name} takes at most {most} tokens, not {asked}", hint=f"give `length={most}`")
        return asked or min(LENGTH, most or LENGTH)

    def write(self, folder: Path, tokens: int | None) -> Path:
        """Write config.json and model.py, whose samples have so many tokens, and return the path of the latter.

        Raises:
            InputError: for a folder that holds another model.
            PlannerError: where nothing can be written.
        """
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
    """Return the model of a name: of `MODELS`, of a class of transformers, or a path that ends in .json.

    Raises:
        InputError: for a name or a file that is none of these, and where transformers is not installed.
    """
    if name.endswith(".json"):
        found = _of_file(Path(name))
    elif (config := MODELS.get(name.lower())) is not None:
        found = NamedModel(name.lower(), config)
    else:
        found = _of_class(name)
    classes = found.config["architectures"]
    with _told(found.name):
        if not hasattr(_transformers(found.name), classes[0]):
            raise ValueError(f"it has no class {classes[0]}")
    return found


def _of_file(path: Path) -> NamedModel:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise InputError(f"'{path}' cannot be read: {cause.strerror}", hint="name a config.json") from None
    except ValueError as cause:
        raise InputError(f"'{path}' is not JSON: {cause}", hint="name a config.json of transformers") from None
    for field in ("architectures", "model_type"):
        if not isinstance(config, dict) or not config.get(field):
            raise InputError(
                f"'{path}' has no field '{field}', so it does not say which model it is",
                hint='a config.json of transformers has, such as "architectures": ["LlamaForCausalLM"]',
            )
    return NamedModel(path.resolve().parent.name if path.stem == "config" else path.stem, config)


def _of_class(name: str) -> NamedModel:
    transformers = _transformers(name) if name.isidentifier() and name[:1].isupper() else None
    with _told(name):
        made_from = getattr(getattr(transformers, name, None), "config_class", None)
    if made_from is None:
        near = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise InputError(
            f"there is no model '{name}'",
            hint=f"{meant}Give a model file, a config.json, a class of transformers such as LlamaForCausalLM, or one "
            f"of {', '.join(MODELS)}",
        )
    return NamedModel(name, {"architectures": [name], "model_type": made_from.model_type})


def _transformers(name: str) -> Any:
    if find_spec("transformers") is None:
        raise InputError(f"'{name}' is built by transformers, which is not installed", hint=_INSTALL)
    return import_module("transformers")


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Say in one sentence what transformers, which loads its models when they are asked for, says in many."""
    try:
        yield
    except (ImportError, RuntimeError, ValueError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise InputError(
            f"transformers cannot load '{name}': {str(cause).splitlines()[0].partition('. ')[0]}",
            hint="the name may be of another version of transformers; where torchvision is named, it is of another "
            "build than torch",
        ) from error
