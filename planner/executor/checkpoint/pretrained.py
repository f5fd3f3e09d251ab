"""Initial weights from safetensors files: each worker reads those of its own stages, and no others.

A file is found as people publish them: one file, a folder with `model.safetensors`, or a folder
with `model.safetensors.index.json`, which says which of several files holds each tensor.
"""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from planner.errors import InputError
from planner.executor.checkpoint.tensor_file import SUFFIX, each_tensor, tensor_shapes
from planner.formats.files import read_json
from planner.model.spec import TrainingSpec
from planner.model.user_functions import NameInFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Pretrained:
    """The tensors that a model file names as its initial weights.

    Args:
        name_in_file: of a name in the model: its name in the files, or None to keep the
            constructor's values; None for the same names, where the files must have all of the
            model's, and no others.
    """

    def __init__(self, path: Path, name_in_file: NameInFile | None = None) -> None:
        self.path = path
        self._name_in_file = name_in_file
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in _files(path):
            shapes = tensor_shapes(file)
            self._shapes |= shapes
            self._files |= dict.fromkeys(shapes, file)

    @classmethod
    def named_by(cls, spec: TrainingSpec) -> "Pretrained | None":
        """Return the weights that a model file names; None where it names none."""
        found = spec.pretrained()
        if found is None:
            return None
        return cls(*found)

    def sources(self, model: nn.Module) -> dict[str, str]:
        """Return the name in the files for each parameter and buffer that is read, by every name in
        the model.
        """
        state = model.state_dict(keep_vars=True)
        names: dict[Tensor, list[str]] = {}
        for name, tensor in state.items():
            if isinstance(tensor, Tensor):  # and no extra state of a module
                names.setdefault(tensor, []).append(name)

        sources: dict[str, str] = {}
        for tensor, tied in names.items():
            wanted = tied
            if self._name_in_file is not None:
                wanted = [n for name in tied if (n := self._name_in_file(name))]
            present = [name for name in wanted if name in self._shapes]
            if wanted and not present:
                hint = (
                    f"its names are such as '{min(self._shapes, default='')}': return (path, "
                    f"function), "
                )
                problem = f"'{self.path}' has no '{wanted[0]}', which the model has as '{tied[0]}'"
                raise InputError(
                    problem,
                    hint=f"{hint}which gives the name in the files, or None, from pretrained()",
                )
            for name in present:
                if (there := self._shapes[name]) != (here := tuple(tensor.shape)):
                    problem = (
                        f"'{name}' has the shape {there} in '{self._files[name]}' and "
                        f"{here} in the model"
                    )
                    hint = (
                        "for a new head, let pretrained() return a function that gives None "
                        "for its names"
                    )
                    raise InputError(problem, hint=f"are these the weights of this model? {hint}")
            if present:
                # As load_state_dict does, which reads one name after the other, the last wins.
                sources |= dict.fromkeys(tied, present[-1])

        unknown = next((name for name in self._shapes if name not in state), None)
        if self._name_in_file is None and unknown is not None:
            problem = f"'{self._files[unknown]}' has '{unknown}', which the model does not have"
            hint = (
                "to take what it has and leave the rest, return (path, lambda name: name) "
                "from pretrained()"
            )
            raise InputError(problem, hint=f"are these the weights of this model? {hint}")

        return sources

    def fill(self, model: nn.Module, names: Collection[str]) -> None:
        """Overwrite the parameters and buffers of `model` called `names` with the files' values,
        one at a time.
        """
        state = model.state_dict(keep_vars=True)
        target = {
            source: state[name] for name, source in self.sources(model).items() if name in names
        }
        with torch.no_grad():
            for file in dict.fromkeys(self._files[source] for source in target):
                here = [source for source in target if self._files[source] == file]
                for source, tensor in each_tensor(file, here):
                    target[source].copy_(tensor)


def _files(path: Path) -> list[Path]:
    index = path / INDEX if path.is_dir() else path
    if index.name.endswith(".index.json") and index.exists():
        try:
            listed = read_json(index)["weight_map"].values()
            return [index.parent / str(name) for name in dict.fromkeys(listed)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                f"'{index}' is no index of safetensors files", hint='it has a "weight_map"'
            ) from None

    if path.suffix == SUFFIX and path.is_file():
        found = [path]
    else:
        found = sorted(path.glob(f"*{SUFFIX}"))

    if not found:
        hint = (
            "weights are read from safetensors files alone: "
            "safetensors.torch.save_file(state, path) writes one"
        )
        raise InputError(
            f"there are no pretrained weights in safetensors files at '{path}'", hint=hint
        )

    if path / SINGLE not in found:
        return found
    return [path / SINGLE]
