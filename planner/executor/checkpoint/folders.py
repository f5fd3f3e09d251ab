"""Checkpoints on disk: which are complete, what is in them, which one a run resumes from, which to
remove.

    FOLDER/
        step-00000200/                    complete: it got this name when all in it was on disk
            index.json                    a `Checkpoint`, with the checksums of all files beside it
            index.sha256                  its own checksum; `sha256sum -c` reads it
            stage-0.weights.safetensors   parameters and buffers by their names in the model
            stage-0.optimizer.safetensors
            ...
        step-00000200-7/                  the seventh that was written, another has its name
        .step-00000300.f3a1.partial/      of a run that ended while it wrote

Their order is that in which they were written, which an index has as its `sequence`. Minibatches do
not tell it: a run that goes on with larger ones counts fewer of them.

A folder is renamed into place, so at any moment there is the whole checkpoint or none of it. What
chooses one raises InputError when there is none, or when it is of another model or run.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from planner.errors import InputError
from planner.executor.checkpoint.optimizer_state import OptimizerState
from planner.executor.checkpoint.tensor_file import TensorFile
from planner.executor.observe.run_log import is_of
from planner.formats.files import Record, load_record, replace, save_record, write_text
from planner.formats.plan import Plan
from planner.options.training import BaselineName, CheckpointOptions

INDEX = "index.json"
INDEX_DIGEST = "index.sha256"
OTHER = "resume from another checkpoint with `resume=PATH`"
REMEDY = "train with `checkpoint_every=N` to write checkpoints"
AUTO = "auto"  # the newest checkpoint in the run's own folder, or none
# A folder by which rank 0 checks that all hosts see its files, named like a half-written
# checkpoint, so that `remove_leftovers` removes one that a crash left behind.
PROBE = "sign"
STEP = "step-"
# the minibatch, and the sequence number where an older checkpoint has that name
_NAME = re.compile(rf"{STEP}(\d+)(?:-\d+)?", re.ASCII)
_PARTIAL = ".partial"
_REMOVED = ".removed"
_NO_RUN_ID = "none"  # torchrun's id of every run that was started without --rdzv-id


class StagePart(Record):
    """What one replica of one stage wrote: the first replica everything, the others only their own
    buffers.

    A tied parameter is stored once; `aliases` maps its other names to the stored one.
    """

    stage: int
    replica: int
    weights: TensorFile
    aliases: dict[str, str]
    optimizer: OptimizerState | None = None
    optimizer_file: TensorFile | None = None
    # state of learning rate schedulers and the like, by `optimizer_state.to_json`
    extras: dict[str, Any]

    @model_validator(mode="after")
    def _has_whole_optimizer(self) -> Self:
        if (self.optimizer is None) != (self.optimizer_file is None):
            raise ValueError("an optimizer has both its state and a file of tensors, or neither")
        return self


class Checkpoint(Record):
    """index.json: where a run was after `minibatch` minibatches, at a point where its pipeline was
    empty.
    """

    schema_version: Literal[1, 2] = 2  # 1 had no checksum of its own
    tool: str
    torch: str
    model: str
    graph_hash: str
    config: str  # of the plan that wrote it; any other plan of the model can read it
    schedule: str
    seed: int  # random numbers are a function of it and of the minibatch
    minibatch: Annotated[int, Field(ge=0)]  # minibatches done
    sequence: Annotated[int, Field(ge=0)] = 0  # grows in a folder; 0 in older files: the first
    minibatch_size: Annotated[int, Field(ge=1)]
    minibatches_per_epoch: Annotated[int, Field(ge=1)] | None  # None without a dataset
    samples: int | None = None  # of dataset(); None without one, and in older files
    order: int | None = None  # digest of the first epoch's, where sampler() gives it
    fed: bool = False  # whether a script handed the minibatches in
    layers: tuple[tuple[str, ...], ...] = ()  # of each stage; not in files of version 0.1
    parts: tuple[StagePart, ...]

    def parts_with(self, layers: set[str]) -> tuple[StagePart, ...]:
        """Return the parts of the stages that had any of these layers."""
        return tuple(part for part in self.parts if layers & set(self.layers[part.stage]))


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint: its folder, and its index."""

    path: Path
    index: Checkpoint

    @property
    def first_replicas(self) -> list[StagePart]:
        return [part for part in self.index.parts if part.replica == 0]

    def check_fits(self, plan: Plan, seed: int | None) -> None:
        """Raise InputError for a checkpoint that a run of this plan cannot continue from."""
        index = self.index
        if index.graph_hash != plan.graph_hash:
            problem = (
                f"the checkpoint '{self.path}' is of another model than the plan: "
                f"'{index.model}', '{plan.model}'"
            )
            hint = (
                "its operations, sizes and precision must be the same; cut and schedule of "
                "the plan may differ"
            )
            raise InputError(problem, hint=hint)

        if seed not in (None, index.seed):
            problem = f"the checkpoint '{self.path}' is of a run with seed {index.seed}, not {seed}"
            raise InputError(problem, hint=f"resume with `seed={index.seed}` or without a seed")


def save_index(folder: Path, index: Checkpoint) -> None:
    """Write a checkpoint's index, and the checksum of it."""
    save_record(index, folder / INDEX)
    write_text(folder / INDEX_DIGEST, _digest_line(folder))


def load_checkpoint(path: Path) -> SavedCheckpoint:
    """Read the index of a checkpoint; raise InputError when it is not the one that was written
    there.
    """
    index = load_record(Checkpoint, path / INDEX, InputError, REMEDY)
    if index.schema_version > 1:
        _check_digest(path)
    elif (path / INDEX_DIGEST).exists():
        problem = (
            f"'{path / INDEX}' says that it is of version 1, which had no checksum, and has one"
        )
        raise InputError(problem, hint=OTHER)

    named = _NAME.fullmatch(path.resolve().name)
    if named is not None and int(named[1]) != index.minibatch:
        raise InputError(
            f"the index of '{path}' is of minibatch {index.minibatch}, and the folder's name is "
            f"of another",
            hint=OTHER,
        )

    return SavedCheckpoint(path, index)


def _check_digest(path: Path) -> None:
    try:
        written = (path / INDEX_DIGEST).read_text(encoding="ascii", errors="replace")
        actual = _digest_line(path)
    except OSError as cause:
        problem = f"'{path / INDEX_DIGEST}' cannot be read: {cause.strerror or cause}"
        raise InputError(problem, hint=OTHER) from None

    if actual != written:
        problem = f"'{path / INDEX}' is corrupt: its SHA-256 is not the one in {INDEX_DIGEST}"
        raise InputError(problem, hint=OTHER)


def _digest_line(folder: Path) -> str:
    return f"{hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()}  {INDEX}\n"


def partial_name(what: str, token: str) -> str:
    """Return the name of a folder while it is written; `token` tells the runs that write to one
    folder apart.
    """
    return f".{STEP}{what}.{token}{_PARTIAL}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, in the order in which they were written."""
    return list(_in_order(folder))


def _in_order(folder: Path) -> dict[Path, Checkpoint | None]:
    """Return the complete checkpoints in `folder` with their indices, in the order in which they
    were written; None for an index that cannot be read.
    """
    minibatches = {
        path: int(named[1])
        for path in folder.glob(f"{STEP}*")
        if (named := _NAME.fullmatch(path.name)) and path.is_dir()
    }
    read = {path: _read_index(path) for path in minibatches}
    # a run that writes there may have removed one meanwhile
    found = {path: index for path, index in read.items() if index is not None or path.is_dir()}
    readable = [index for index in found.values() if index is not None]

    def place(path: Path) -> tuple[int, int]:
        # A damaged one comes behind all with fewer minibatches, so that nobody goes on from an
        # older one in silence.
        index = found[path]
        if index is None:
            before = [each for each in readable if each.minibatch <= minibatches[path]]
            return max((each.sequence for each in before), default=0), minibatches[path]
        return index.sequence, index.minibatch

    return {path: found[path] for path in sorted(found, key=place)}


def _read_index(path: Path) -> Checkpoint | None:
    """Return the index of a checkpoint; None where it is not the one that was written there."""
    try:
        return load_checkpoint(path).index
    except InputError:
        return None


def next_sequence(folder: Path) -> int:
    """Return the sequence number of the next checkpoint in `folder`."""
    indices = _in_order(folder).values()
    return 1 + max((index.sequence for index in indices if index is not None), default=0)


def find(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest complete checkpoint in it."""
    if not path.is_dir():
        raise InputError(f"there is no checkpoint '{path}'", hint=REMEDY)
    if (path / INDEX).exists():
        return path
    inside = complete(path)
    if not inside:
        raise InputError(f"there is no complete checkpoint in '{path}'", hint=REMEDY)
    return inside[-1]


def resolve(resume: str | None, folder: Path, *, writes: bool) -> Path | None:
    """Return the checkpoint that a run resumes from; None when it begins anew."""
    _check_is_folder(folder)
    if resume == AUTO:
        return next(reversed(complete(folder)), None)
    found = None if resume is None else find(Path(resume))
    if writes:
        check_continues(folder, [] if found is None else [found])
    return found


def _check_is_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"'{folder}' is a file, not a folder for checkpoints",
            hint="choose another `checkpoint_folder`",
        )


def check_continues(folder: Path, known: Collection[Path]) -> None:
    """Raise InputError where the newest checkpoint in `folder` is none of the `known` ones, which a
    run has written or resumed from: it would write among those of another run.
    """
    _check_is_folder(folder)
    inside = complete(folder)
    own = {path.resolve() for path in known}
    if not inside or inside[-1].resolve() in own:
        return

    older = [path for path in inside if path.resolve() in own]
    if not older:
        problem = f"'{folder}' has checkpoints of an earlier run, the newest {inside[-1].name}"
        raise InputError(
            problem, hint="continue that run with `resume`, or choose another `checkpoint_folder`"
        )

    problem = f"'{folder}' has a newer checkpoint than '{older[-1]}': {inside[-1].name}"
    raise InputError(
        problem,
        hint="remove it, or choose another `checkpoint_folder`: the run would overwrite it",
    )


def publish(partial: Path, index: Checkpoint) -> Path:
    """Give a folder, all of which is on disk, the name of a complete checkpoint; return that.

    An older checkpoint of the same minibatch makes way for it. One that has this name and counts
    minibatches of another size stays.
    """
    name = partial.with_name(f"{STEP}{index.minibatch:08}")
    if not name.exists():
        _rename(partial, name)
        return name

    beside = name.with_name(f"{name.name}-{index.sequence}")
    _rename(partial, beside)
    older = _read_index(name)
    if older is None or older.minibatch_size != index.minibatch_size:
        return beside

    try:
        # Only now: at any moment one of the two has the name of a complete checkpoint.
        _hide(name)
        _rename(beside, name)
    except OSError:  # NFS may keep an older one that was hidden
        return beside
    return name


def _rename(path: Path, name: Path) -> None:
    """Rename a folder, and wait until its name is on disk."""
    path.rename(name)
    sync_folder(name.parent)


def _hide(path: Path) -> None:
    """Take a checkpoint its name, before its files are removed: a crash meanwhile must not leave
    half a checkpoint under the name of a complete one.
    """
    path.rename(path.with_name(f".{path.name}{_REMOVED}"))


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and damaged ones that are newer."""
    inside = _in_order(folder)
    kept = [path for path, index in inside.items() if index is not None][-keep:]
    removed = takewhile(lambda path: path not in kept, inside) if len(kept) == keep else ()
    for path in removed:
        with suppress(OSError):  # it is looked at again after the next checkpoint
            _hide(path)
    remove_leftovers(folder, _REMOVED)


def remove_leftovers(folder: Path, *endings: str) -> None:
    """Remove what earlier runs did not finish writing or removing."""
    for path in folder.glob(f".{STEP}*"):
        if path.name.endswith(endings or (_PARTIAL, _REMOVED)):
            # NFS keeps a file that another host has open, as .nfs*, and its folder with it: the
            # next call tries again.
            shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk: fsync of a file makes its content durable, not
    its name.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seed_of_run(
    options: CheckpointOptions,
    plan: Plan,
    seed: int | None = None,
    baseline: BaselineName | None = None,
) -> int:
    """Return the seed of a run with `plan`: that of the checkpoint it resumes from, or `seed`, or
    0.
    """
    if options.checkpoint_every is None and options.resume is None:
        return seed or 0
    if baseline is not None:
        problem = f"checkpoints are of plans, and `baseline={baseline}` trains without one"
        raise InputError(problem, hint="leave out `checkpoint_every` and `resume`")

    path = resolve(
        options.resume, Path(options.checkpoint_folder), writes=options.checkpoint_every is not None
    )
    if path is None:
        return seed or 0
    saved = load_checkpoint(path)
    saved.check_fits(plan, seed)
    return saved.index.seed


def after_torchrun_restart(
    options: CheckpointOptions, *, elastic: bool
) -> CheckpointOptions | None:
    """Return the options of workers that torchrun restarted: resume from the newest checkpoint of
    their own run.

    In an `elastic` run a host that has just come was never restarted, nor was its worker.

    None for the first workers of a run, and for a run without a checkpoint. Worker 0 decides,
    because it has the run's losses; the others follow what it finds.
    """
    folder = Path(options.checkpoint_folder)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and not elastic
    if first or options.checkpoint_every is None or not complete(folder):
        return None
    if os.environ.get("RANK") == "0" and not is_of(folder, torchrun_run_id()):
        return None
    return replace(options, resume=AUTO)


def torchrun_run_id() -> str:
    """Return an id that all starts of a run share and no other run has: torchrun's own, or that of
    its process.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", _NO_RUN_ID)
    if run != _NO_RUN_ID:
        return run
    parent = os.getppid()
    boot = Path("/proc/sys/kernel/random/boot_id")
    stat = Path(f"/proc/{parent}/stat")
    if not (boot.exists() and stat.exists()):  # not Linux
        return f"{run} {parent}"
    # Process ids are used again, so its start and the boot of the machine are part of the id.
    # proc_pid_stat(5): starttime, the 22nd field
    started = stat.read_text().rpartition(")")[2].split()[19]
    return f"{run} {parent} {started} {boot.read_text().strip()}"
