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


def remove_checkpoints(output: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond `limit`, but neither the newest nor the best."""
    if limit is None or limit <= 0:
        return
    folders = sorted(output.glob(f"{CHECKPOINT}-*"), key=_step_of)
    kept = {folders[-1], *(folder for folder in folders if str(folder) == best)}
    surplus = len(folders) - max(limit, len(kept))
    removable = [folder for folder in folders if folder not in kept]
    for folder in removable[: max(0, surplus)]:
        shutil.rmtree(folder)


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


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
