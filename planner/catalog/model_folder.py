"""Write the model file of a name: a built-in size, a class of transformers, or a config.json."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from planner.catalog.names import MODELS, Config
from planner.errors import InputError
from planner.formats.files import write_text

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
