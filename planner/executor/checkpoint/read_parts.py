"""Filling modules and optimizers from a checkpoint, whatever plan it was written under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import InputError
from planner.executor.checkpoint.index import Checkpoint, StagePart, TensorFile
from planner.executor.checkpoint.json_values import from_json
from planner.executor.checkpoint.optimizer_state import give_state, rescale_rates, tensor_name
from planner.executor.checkpoint.tensor_file import FileDigest, read_tensors


def fill_module(module: nn.Module, path: Path, index: Checkpoint, *, stage: int = 0, replica: int = 0) -> None:
    """Overwrite the parameters and buffers of `module`, a stage or the whole model, with those at `path`.

    Where several parts have a buffer (each replica counts its own BatchNorm statistics), that of the same replica
    is taken, or the first one's, and of the same stage, or the last one's.

    Raises:
        InputError: when something is missing or has another shape, or a file is not what was written.
    """
    parts = sorted(index.parts, key=lambda part: (part.replica == replica, part.replica == 0, part.stage == stage))
    state = module.state_dict(keep_vars=True)
    saved = read_weights(path, parts, set(state))
    with torch.no_grad():
        for name, tensor in state.items():
            if name not in saved:
                raise InputError(
                    f"the checkpoint '{path}' has no '{name}', which the model has",
                    hint="is it a checkpoint of this model?",
                )
            value = saved[name]
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise InputError(
                    f"'{name}' is {value.dtype} of shape {tuple(value.shape)} in the checkpoint '{path}', and "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)} in the model",
                    hint="is it a checkpoint of this model?",
                )
            tensor.copy_(value)


def read_weights(path: Path, parts: Sequence[StagePart], names: set[str] | None) -> dict[str, Tensor]:
    """The tensors called `names` as far as `parts` have them, or all; later parts win. Tied ones under all their names.

    Raises:
        InputError: when a file is not what was written.
    """
    source: dict[str, tuple[TensorFile, str]] = {}
    for part in parts:
        stored = {name: name for name in part.weights.tensors} | part.aliases
        source |= {name: (part.weights, first) for name, first in stored.items() if names is None or name in names}
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(file for file, _ in source.values()):
        own = {name: first for name, (its, first) in source.items() if its is file}
        read = _read(path, file, set(own.values()))
        tensors |= {name: read[first] for name, first in own.items()}
    return tensors


def fill_optimizer(
    optimizer: Optimizer,
    module: nn.Module,
    path: Path,
    index: Checkpoint,
    *,
    stage: int = 0,
    learning_rate_factor: float = 1.0,
) -> None:
    """Give `module`'s optimizer, whose rates are `learning_rate_factor` times the user's, the state at `path`.

    Raises:
        InputError: when it is another optimizer, or a file is not what was written.
    """
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    saved, tensors = [], {}
    for part in sorted(index.parts, key=lambda part: part.stage == stage):
        if part.optimizer is None or part.optimizer_file is None:
            continue
        relevant = [name for group in part.optimizer.groups for name in group.parameters if name in own]
        if relevant:
            saved.append(part.optimizer)
            states: Mapping[str, Sequence[str]] = {n: s.tensors for n, s in part.optimizer.states.items()}
            names = {tensor_name(name, key) for name in relevant for key in states.get(name, ())}
            tensors.update(_read(path, part.optimizer_file, names))
    give_state(optimizer, module, saved, tensors, learning_rate_factor)


def scheduler_state(
    path: Path, index: Checkpoint, name: str, groups: int, *, stage: int = 0, learning_rate_factor: float = 1.0
) -> dict[str, Any]:
    """The state called `name` that the stage of that number left, or else any: all have done the same minibatches.

    Args:
        path: of the checkpoint.
        index: its index.
        name: of the state.
        groups: that the optimizer has now.
        stage: preferred.
        learning_rate_factor: by which its rates are to be larger than the user's.

    Raises:
        InputError: when there is none that fits.
    """
    found = [part for part in index.parts if name in part.extras]
    if not found:
        raise InputError(
            f"the checkpoint '{path}' has no state of a {name}, which the model file has now",
            hint="give the model file what the run began with",
        )
    part = min(found, key=lambda part: part.stage != stage)
    state: dict[str, Any] = from_json(part.extras[name])
    rates = state.get("base_lrs")
    if rates is not None and len(rates) != groups:
        raise InputError(
            f"the {name} in the checkpoint '{path}' is of {len(rates)} groups of parameters, the optimizer has "
            f"{groups}",
            hint="give the model file the optimizer() that the run began with",
        )
    before = 1.0 if part.optimizer is None else part.optimizer.learning_rate_factor
    return rescale_rates(state, learning_rate_factor / before)


def _read(path: Path, file: TensorFile, names: set[str]) -> dict[str, Tensor]:
    return read_tensors(path / file.name, names, FileDigest(file.size_bytes, file.sha256))
