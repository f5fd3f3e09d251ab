"""The index of a checkpoint: which files it has, what is in them, and which run wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.errors import InputError
from planner.executor.checkpoint.optimizer_state import OptimizerState
from planner.formats.files import Record, load_record
from planner.formats.plan import Plan

INDEX = "index.json"
REMEDY = "train with `every=N` to write checkpoints"


class TensorFile(Record):
    """A safetensors file of a checkpoint."""

    name: str
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: str
    tensors: tuple[str, ...]


class StagePart(Record):
    """What one replica of one stage wrote: the first replica everything, the others only their own buffers.

    A tied parameter is stored once; `aliases` maps its other names to the stored one.
    """

    stage: int
    replica: int
    weights: TensorFile
    aliases: dict[str, str]
    optimizer: OptimizerState | None = None
    optimizer_file: TensorFile | None = None
    extras: dict[str, Any]  # state of learning rate schedulers and the like, by `json_values.to_json`


class Checkpoint(Record):
    """index.json: where a run was after `minibatch` minibatches, at a point where its pipeline was empty."""

    schema_version: Literal[1] = 1
    tool: str
    torch: str
    model: str
    graph_hash: str
    config: str  # of the plan that wrote it; any other plan of the model can read it
    schedule: str
    seed: int  # random numbers are a function of it and of the minibatch
    minibatch: Annotated[int, Field(ge=0)]  # minibatches done
    minibatch_size: Annotated[int, Field(ge=1)]
    minibatches_per_epoch: Annotated[int, Field(ge=1)] | None  # None without a dataset
    parts: tuple[StagePart, ...]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk: its folder and its index."""

    path: Path
    index: Checkpoint

    @property
    def first_replicas(self) -> list[StagePart]:
        """The parts that hold the whole model between them."""
        return [part for part in self.index.parts if part.replica == 0]

    def check_fits(self, plan: Plan, seed: int | None) -> None:
        """Check that the checkpoint is of the plan's model and, unless `seed` is None, of a run with that seed.

        Raises:
            InputError: otherwise.
        """
        index = self.index
        if index.graph_hash != plan.graph_hash:
            raise InputError(
                f"the checkpoint '{self.path}' is of another model: graph {index.graph_hash[:12]}… of '{index.model}' "
                f"in it, {(plan.graph_hash or 'none')[:12]}… of '{plan.model}' in the plan",
                hint="resume with a plan for the same model; its cut and its schedule may differ",
            )
        if seed not in (None, index.seed):
            raise InputError(
                f"the checkpoint '{self.path}' is of a run with seed {index.seed}, not {seed}",
                hint=f"resume with `seed={index.seed}` or without a seed: data order and dropout follow from it",
            )


def load_checkpoint(path: Path) -> SavedCheckpoint:
    """Read the index of the checkpoint at `path`; raise InputError when the index is missing or malformed."""
    return SavedCheckpoint(path, load_record(Checkpoint, path / INDEX, InputError, REMEDY))
