"""Folders of checkpoints: which are complete, which one to resume from, which to remove.

    FOLDER/
        step-00000200/                    complete: it got this name when everything in it was on disk
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

from planner.errors import InputError
from planner.executor.checkpoint.index import INDEX, REMEDY

AUTO = "auto"  # the newest checkpoint in the run's own folder, or none
_STEP, _PARTIAL, _REMOVED = "step-", ".partial", ".removed"


def folder_name(minibatch: int) -> str:
    """Return the name of a complete checkpoint after `minibatch` minibatches."""
    return f"{_STEP}{minibatch:08}"


def partial_name(minibatch: int, token: str) -> str:
    """Return the name of a checkpoint while it is written; `token` tells the runs that write to one folder apart."""
    return f".{folder_name(minibatch)}.{token}{_PARTIAL}"


def probe_name(token: str) -> str:
    """Return the name of a folder by which rank 0 checks that all hosts see its files.

    It is named like a half-written checkpoint, so `remove_leftovers` removes one that a crash left behind.
    """
    return f".{_STEP}sign.{token}{_PARTIAL}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob(f"{_STEP}*") if path.name[len(_STEP) :].isdigit() and path.is_dir()]
    # By number: names of more than eight digits would sort in front of shorter ones.
    return sorted(found, key=_minibatch_of)


def _minibatch_of(path: Path) -> int:
    return int(path.name[len(_STEP) :])


def find(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest complete checkpoint in it.

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
    """Return the checkpoint that a run resumes from; None when it begins anew.

    Raises:
        InputError: when there is no such checkpoint, or the run would mix its checkpoints with another run's.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"'{folder}' is a file, not a folder for checkpoints", hint="choose another `folder`")
    inside = complete(folder) if folder.is_dir() else []
    if resume == AUTO:
        return inside[-1] if inside else None
    found = None if resume is None else find(Path(resume))
    if not writes or not inside:
        return found
    if found is None or found.resolve() not in [path.resolve() for path in inside]:
        raise InputError(
            f"'{folder}' has checkpoints of an earlier run, the newest {inside[-1].name}",
            hint="continue that run with `resume`, or choose another `folder`",
        )
    if _minibatch_of(inside[-1]) > _minibatch_of(found):
        raise InputError(
            f"'{folder}' has a newer checkpoint than '{found}': {inside[-1].name}",
            hint="remove it, or choose another `folder`: the run would overwrite it",
        )
    return found


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints in `folder`."""
    for path in complete(folder)[:-keep]:
        # Hidden first: a crash within rmtree must not leave half a checkpoint under the name of a complete one.
        hidden = path.with_name(f".{path.name}{_REMOVED}")
        path.rename(hidden)
        shutil.rmtree(hidden)


def remove_leftovers(folder: Path) -> None:
    """Remove what earlier runs did not finish writing or removing."""
    for pattern in (f".{_STEP}*{_PARTIAL}", f".{_STEP}*{_REMOVED}"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk.

    fsync of a file makes its content durable, not its name: that is an entry of the folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
