"""The folders of a PipelineTrainer's checkpoints.

checkpoint-500/model.safetensors, config.json, ...    as Trainer writes them, for from_pretrained
               trainer_state.json                     as Trainer writes it
               pipeline/                              as planner.pipeline writes it
               generators.pt                          what collators and samplers draw from
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers.trainer_utils import get_last_checkpoint

from planner.errors import InputError

CHECKPOINT = "checkpoint"  # what the names of the folders begin with
STATE = "trainer_state.json"
PIPELINE = "pipeline"
_GENERATORS = "generators.pt"


def checkpoint_to_resume(wanted: str | bool | None, output: str) -> Path | None:
    """Return the checkpoint to continue from: a folder, or for True the newest in `output`.

    Raises:
        InputError: where there is none, or a Trainer wrote it.
    """
    if not wanted:
        return None
    found = get_last_checkpoint(output) if wanted is True else wanted
    if found is None or not (Path(found) / STATE).is_file():
        raise InputError(
            f"there is no checkpoint in '{found or output}'",
            hint="give resume_from_checkpoint a folder such as checkpoint-500, or leave it out",
        )

    if not (Path(found) / PIPELINE).is_dir():
        raise InputError(
            f"'{found}' is no checkpoint of a PipelineTrainer: it has no folder '{PIPELINE}'",
            hint="load its weights with from_pretrained(), and begin a new training",
        )

    return Path(found)


def remove_checkpoints(output: Path, limit: int | None, best: str | None, written: Path) -> None:
    """Remove the oldest checkpoints beyond `limit`, but neither the best nor the one just written.

    The oldest are those written first, as Trainer has it: a run that was resumed from an earlier
    step writes lower numbers than it finds.
    """
    if limit is None or limit <= 0:
        return
    folders = _by_age(output)
    kept = {folder for folder in folders if folder == written or str(folder) == best}
    surplus = len(folders) - max(limit, len(kept))
    removable = [folder for folder in folders if folder not in kept]
    for folder in removable[: max(0, surplus)]:
        shutil.rmtree(folder)


def _by_age(output: Path) -> list[Path]:
    """Return the checkpoints in `output`, the oldest first: by their steps where they seem to be
    of one second, as on file systems that keep no times.
    """
    steps = {}
    for folder in output.glob(f"{CHECKPOINT}-*"):
        step = folder.name.removeprefix(f"{CHECKPOINT}-")
        if step.isdecimal() and folder.is_dir():  # others are not ours, such as checkpoint-5-backup
            steps[folder] = int(step)

    ages = {folder: folder.stat().st_mtime for folder in steps}
    if max(ages.values(), default=0.0) - min(ages.values(), default=0.0) < 1:
        return sorted(steps, key=lambda folder: steps[folder])
    return sorted(ages, key=lambda folder: (ages[folder], steps[folder]))


def write_generators(folder: Path) -> None:
    """Write the states of the host's generators, which are the same on all workers."""
    name, keys, *others = numpy.random.get_state(legacy=True)
    assert isinstance(keys, numpy.ndarray)
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), *others),
    }
    torch.save(states, folder / _GENERATORS)


def read_generators(folder: Path) -> dict[str, Any]:
    """Return what `write_generators` wrote; raise InputError where that is gone."""
    path = folder / _GENERATORS
    if not path.is_file():
        raise InputError(
            f"the checkpoint has no '{path}'",
            hint="resume from another checkpoint; save_only_model=True writes none to resume from",
        )
    states: dict[str, Any] = torch.load(path, weights_only=True)
    return states


def set_generators(states: Mapping[str, Any]) -> None:
    """Let the host's generators go on from these states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, *others = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *others))
