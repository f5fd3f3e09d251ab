"""Models by name, as transformers builds them without their weights: find a configuration, and
write its model file.

Names and sizes are in `models.json`, by transformers' `model_type`: a class, the fields of a
configuration that say a size, and a line for each name. Sizes are those of the published
config.json files on the Hugging Face hub, and of the papers that are named there. Aliases are other
names of the same sizes: llama-3.1 differs from llama-3 in its rotary embedding alone.
"""

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
from planner.formats.files import check_writable, read_json, write_text
from planner.formats.names import StateName

Config = Mapping[str, Any]


def _read() -> tuple[dict[str, Config], dict[str, str]]:
    kinds = json.loads(
        resources.files("planner.catalog").joinpath("models.json").read_text(encoding="utf-8")
    )
    models = dict[str, Config]()
    aliases = dict[str, str]()
    for kind, known in kinds.items():
        aliases |= known.get("aliases", {})
        for name, sizes in known["sizes"].items():
            fields = dict(zip(known["fields"].split(), sizes, strict=True))
            models[name] = {"architectures": [known["architecture"]], "model_type": kind, **fields}

    return models, aliases


MODELS, ALIASES = _read()
# What names on a hub have besides: "meta-llama/Llama-3.1-8B-Instruct",
# "google/vit-large-patch16-224".
_BESIDES = re.compile(
    r"^(.*/)?(meta-(?=llama))?|-(hf|base|instruct|chat|it|pt|v0\.\d|v1|(un)?cased|patch\d.*)(?=-|$)"
)


LENGTH = 2048  # tokens of a sample, where the model takes as many
# in configurations: tokens that a model takes
_LENGTHS = ("max_position_embeddings", "n_positions")
_TEMPLATE = "transformers_model.py"
_INSTALL = "pip install 'transformers>=4.50'"


@dataclass(frozen=True)
class NamedModel:
    """A model of transformers, whose file is yet to be written."""

    name: str  # also of its folder
    # as transformers writes it to config.json, with `architectures` and `model_type`
    config: Config

    def tokens(self, asked: int | None) -> int | None:
        """Return the tokens of a sample, asked for or up to 2,048; None for images; raise
        InputError for too many.
        """
        with _transformers(self.name) as transformers:
            full = transformers.AutoConfig.for_model(**self.config)
        if hasattr(full, "image_size"):
            if asked is not None:
                raise InputError(
                    f"{self.name} reads images, not {asked} tokens", hint="leave out `length`"
                )
            return None

        limits = [limit for name in _LENGTHS if isinstance(limit := getattr(full, name, None), int)]
        most = min(limits, default=None)
        if asked is not None and most is not None and asked > most:
            raise InputError(
                f"{self.name} takes at most {most} tokens, not {asked}",
                hint=f"give `length={most}`",
            )

        return asked or min(LENGTH, most or LENGTH)

    def write(
        self,
        folder: Path,
        tokens: int | None,
        lora_rank: int | None = None,
        states: StateName = "float32",
    ) -> Path:
        """Write config.json and model.py, whose path is returned.

        Args:
            folder: is made, if it does not exist.
            tokens: of a sample; None for images.
            lora_rank: of adapters that are trained in place of the model, which is frozen.
            states: type of the optimizer's moments.

        Raises:
            InputError: where another model is; or for adapters without `peft`.
        """
        if lora_rank is not None:
            check_peft(self.name)
        template = (
            resources.files("planner.catalog").joinpath(_TEMPLATE).read_text(encoding="utf-8")
        )
        model = _with_constant(template, "LENGTH", LENGTH, tokens or LENGTH)
        model = _with_constant(model, "LORA_RANK", 0, lora_rank or 0)
        model = _with_constant(model, "STATES", '"float32"', f'"{states}"')
        texts = {"config.json": json.dumps(self.config, indent=1) + "\n", "model.py": model}
        for name, text in texts.items():
            path = folder / name
            check_writable(path)
            if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
                raise InputError(
                    f"'{path}' is of another model, or of this one with other options",
                    hint="choose another folder with `output`, or delete this one",
                )

        for name, text in texts.items():
            write_text(folder / name, text)
        return folder / "model.py"


def _with_constant(template: str, name: str, usual: int | str, value: int | str) -> str:
    """Return the template with another value of one of its constants."""
    line = f"{name} = {usual}  #"
    assert line in template, f"{_TEMPLATE} has {name}"
    return template.replace(line, f"{name} = {value}  #")


def check_peft(name: str) -> None:
    """Raise InputError where the library that makes LoRA adapters is not installed."""
    if find_spec("peft") is None:
        raise InputError(
            f"the adapters of '{name}' are made by peft, which is not installed",
            hint="pip install peft",
        )


def find_model(name: str) -> NamedModel:
    """Return the model of a name in `MODELS`, a class of transformers or a config.json; raise
    InputError for others.
    """
    if name.lower() in MODELS:
        plain = name.lower()
    else:
        plain = _BESIDES.sub("", name.lower().replace("_", "-"))

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
                hint=did_you_mean(plain, [*MODELS, *ALIASES]).strip()
                or "give a model file, a config.json, a class of transformers such as "
                "LlamaForCausalLM, or one of "
                + ", ".join(MODELS),
            )
        found = NamedModel(name, {"architectures": [name], "model_type": made_from.model_type})

    with _transformers(found.name) as transformers:
        if not hasattr(transformers, found.config["architectures"][0]):
            raise ValueError(f"it has no class {found.config['architectures'][0]}")

    return found


def _of_file(path: Path) -> NamedModel:
    try:
        config = read_json(path)
    except (OSError, ValueError) as cause:
        why = getattr(cause, "strerror", None) or cause
        raise InputError(
            f"'{path}' cannot be read as JSON: {why}", hint="name a config.json"
        ) from None

    for field in ("architectures", "model_type"):
        if not isinstance(config, dict) or not config.get(field):
            raise InputError(
                f"'{path}' has no field '{field}', so it does not say which model it is",
                hint='a config.json of transformers has, such as "architectures": '
                '["LlamaForCausalLM"]',
            )

    return NamedModel(path.resolve().parent.name if path.stem == "config" else path.stem, config)


@contextmanager
def _transformers(name: str) -> Iterator[Any]:
    """Import transformers, and say in one sentence what it says in many where it cannot load a
    model.
    """
    if find_spec("transformers") is None:
        raise InputError(
            f"'{name}' is built by transformers, which is not installed", hint=_INSTALL
        )

    try:
        yield import_module("transformers")
    except (ImportError, RuntimeError, ValueError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise InputError(
            f"transformers cannot load '{name}': {str(cause).splitlines()[0].partition('. ')[0]}",
            hint="the name may be of another version of transformers, or torchvision of another "
            "build than torch",
        ) from error
