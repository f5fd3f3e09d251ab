"""Checkpoints as folders: what is in one, which are complete, which is the newest.

    FOLDER/
        step-00000200/                    complete: it got this name when all was written
            index.json                    a `Checkpoint`
            stage-0.weights.safetensors   parameters and buffers by their names in the model
            stage-0.optimizer.safetensors
            ...
        .step-00000300.f3a1.partial/      of a run that ended while it wrote

A folder is renamed into place, so at any moment there is the whole checkpoint or none of it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.errors import InputError
from planner.executor.checkpoint.optimizer_state import OptimizerState
from planner.formats.files import Record, load_record
from planner.formats.plan import Plan

INDEX = "index.json"
AUTO = "auto"  # the newest in the run's own folder, or none
DEFAULT_FOLDER = "checkpoints"
DEFAULT_KEEP = 3
_STEP, _PARTIAL, _REMOVED = "step-", ".partial", ".removed"
REMEDY = "checkpoints are written by: plan train --checkpoint-every N"


class TensorFile(Record):
    """A safetensors file of a checkpoint."""

    name: str
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: str
    tensors: tuple[str, ...]


class StagePart(Record):
    """What one replica of one stage wrote: the first one everything, the others the buffers of their own.

    A tied parameter is stored under one name; `aliases` are its other ones.
    """

    stage: int
    replica: int
    weights: TensorFile
    aliases: dict[str, str]
    optimizer: OptimizerState | None = None
    optimizer_file: TensorFile | None = None
    extras: dict[str, Any]  # of learning rate schedules and the like; see planner.executor.checkpoint.json_values


class Checkpoint(Record):
    """index.json: where a run was after `minibatch` minibatches, at a point where its pipeline was empty."""

    schema_version: Literal[1] = 1
    tool: str
    torch: str
    model: str
    graph_hash: str
    config: str  # of the plan that wrote it; any other may read it
    schedule: str
    seed: int  # random numbers are a function of it and of the minibatch
    minibatch: Annotated[int, Field(ge=0)]  # minibatches done
    minibatch_size: Annotated[int, Field(ge=1)]
    minibatches_per_epoch: Annotated[int, Field(ge=1)] | None  # None without a dataset
    parts: tuple[StagePart, ...]


def folder_name(minibatch: int) -> str:
    """Of the checkpoint after `minibatch` minibatches."""
    return f"{_STEP}{minibatch:08}"


def partial_name(minibatch: int, token: str) -> str:
    """What it is called while it is written, by the run that `token` tells from others."""
    return f".{folder_name(minibatch)}.{token}{_PARTIAL}"


def sign_name(token: str) -> str:
    """A folder that rank 0 makes for the others to see; a leftover as a half-written checkpoint is."""
    return f".{_STEP}sign.{token}{_PARTIAL}"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob(f"{_STEP}*") if path.name[len(_STEP) :].isdigit() and path.is_dir()]
    return sorted(found, key=_minibatch_of)


def _minibatch_of(path: Path) -> int:
    return int(path.name[len(_STEP) :])


def find(path: Path) -> Path:
    """The checkpoint at `path`, or the newest of those in it.

    Raises:
        InputError: when there is none.
    """
    if not path.exists():
        raise InputError(f"there is no checkpoint '{path}'", hint=REMEDY)
    if not path.is_dir():
        raise InputError(f"'{path}' is a file, not the folder of a checkpoint", hint=REMEDY)
    if (path / INDEX).exists():
        return path
    inside = complete(path)
    if not inside:
        raise InputError(f"there is no complete checkpoint in '{path}'", hint=REMEDY)
    return inside[-1]


def resolve(resume: str | None, folder: Path, *, writes: bool) -> Path | None:
    """The checkpoint that a run goes on from: `resume` is a path, AUTO or None; None when it begins anew.

    Args:
        resume: what is asked for.
        folder: of the run's own checkpoints.
        writes: whether it will write any.

    Raises:
        InputError: when there is no such checkpoint, or the run would mix its checkpoints with another's.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"'{folder}' is a file, not a folder for checkpoints", hint="choose another folder")
    inside = complete(folder) if folder.is_dir() else []
    if resume == AUTO:
        return inside[-1] if inside else None
    found = None if resume is None else find(Path(resume))
    if writes:
        own = found is not None and found.resolve() in [path.resolve() for path in inside]
        others = [path for path in inside if found is None or not own or _minibatch_of(path) > _minibatch_of(found)]
        if others and not own:
            raise InputError(
                f"'{folder}' has checkpoints of an earlier run, the newest {others[-1].name}",
                hint="go on from it with --resume, or choose another --checkpoint-folder",
            )
        if others:
            raise InputError(
                f"'{folder}' has a newer checkpoint than '{found}': {others[-1].name}",
                hint="remove it, or choose another --checkpoint-folder: the run would write over it",
            )
    return found


def load_index(path: Path) -> Checkpoint:
    """The index of the checkpoint at `path`.

    Raises:
        InputError: naming what is wrong with it.
    """
    return load_record(Checkpoint, path / INDEX, InputError, REMEDY)


def check_fits(index: Checkpoint, path: Path, plan: Plan, seed: int | None) -> None:
    """The checkpoint must be of the plan's model and, where one is asked for, of the same seed.

    Raises:
        InputError: otherwise.
    """
    if index.graph_hash != plan.graph_hash:
        raise InputError(
            f"the checkpoint '{path}' is of another model: graph {index.graph_hash[:12]}… of '{index.model}' in it, "
            f"{(plan.graph_hash or 'none')[:12]}… of '{plan.model}' in the plan",
            hint="a plan for the same model, any cut and schedule, can go on from it",
        )
    if seed not in (None, index.seed):
        raise InputError(
            f"the checkpoint '{path}' is of a run with seed {index.seed}, not {seed}",
            hint=f"go on with --seed {index.seed}, or none: data order and dropout follow from it",
        )


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints of `folder`, and what earlier runs left half done."""
    for path in complete(folder)[:-keep]:
        # Out of sight first: a checkpoint that is half removed must not look complete.
        hidden = path.with_name(f".{path.name}{_REMOVED}")
        path.rename(hidden)
        shutil.rmtree(hidden)


def remove_leftovers(folder: Path) -> None:
    """Remove what earlier runs began to write, or to remove, and did not finish."""
    for pattern in (f".{_STEP}*{_PARTIAL}", f".{_STEP}*{_REMOVED}"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
