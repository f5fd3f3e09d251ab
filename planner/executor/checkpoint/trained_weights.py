"""Trained weights of the whole, unsplit model: written from those of all workers, or from a checkpoint; read again.

At the end of a run rank 0 writes them tensor by tensor, in bounded memory: it asks for each in the order in which it
writes them, so that none but the current one is on its way. A safetensors file takes each at once. The format of
`torch.save` cannot: for it, rank 0 holds the whole model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint.folders import find, load_checkpoint
from planner.executor.checkpoint.stage_parts import distinct, each_weight
from planner.executor.checkpoint.tensor_file import (
    SUFFIX,
    Fact,
    aligned,
    byte_pieces,
    read_tensors,
    write_pieces,
    write_tensors,
)
from planner.executor.communication.control import broadcast_bytes, control_group, gather_bytes
from planner.formats.files import replacing


class _Held(NamedTuple):
    """A tensor, and the worker that holds it."""

    rank: int
    fact: Fact


def save_gathered(state: Mapping[str, Tensor], path: Path) -> None:
    """Write the union of all workers' `state` on rank 0; all workers call it.

    Args:
        state: of this worker, on its device.
        path: a `.safetensors` file, or one for `torch.load(path, weights_only=True)`. It is replaced when it is whole.

    Raises:
        PlannerError: when the disk is full or the folder cannot be written; an existing file is left as it was, and the
            weights are in another place, which the message names.
        InputError: for a dtype that safetensors files cannot hold.
    """
    own, aliases = (dict(state), {}) if path.suffix == SUFFIX else distinct(state)
    facts = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in own.items()]
    parts = gather_bytes(json.dumps([facts, aliases]).encode())
    if dist.get_rank() != 0:
        while asked := json.loads(broadcast_bytes(b"", control_group())):
            rank, name = asked
            if rank == dist.get_rank():
                for piece in byte_pieces(own[name]):
                    dist.send(piece, 0, control_group())
        return
    held: dict[str, _Held] = {}
    names: dict[str, str] = {}  # all of tied tensors, and whose values they have
    for rank, part in enumerate(parts):
        theirs, others = json.loads(part)
        # Stages that share a weight have equal copies: the last one's is taken.
        held |= {name: _Held(rank, Fact(name, getattr(torch, dtype), tuple(shape))) for name, dtype, shape in theirs}
        names |= {name: name for name, _, _ in theirs} | others

    def pieces_of(facts: Sequence[Fact]) -> Generator[memoryview, None, None]:
        for fact in facts:
            yield from _pieces(held[fact.name], own)

    def write(path: Path) -> None:
        ordered = aligned(each.fact for each in held.values())
        with replacing(path) as temporary:
            if path.suffix == SUFFIX:
                with closing(pieces_of(ordered)) as pieces:
                    write_pieces(temporary, ordered, pieces)
            else:
                tensors = {name: _whole(each, own) for name, each in held.items()}
                torch.save({name: tensors[first] for name, first in names.items()}, temporary)

    try:
        _write_somewhere(path, sum(each.fact.size_bytes for each in held.values()), write)
    finally:
        broadcast_bytes(b"[]", control_group())  # no more is asked for


def _write_somewhere(path: Path, size_bytes: int, write: Callable[[Path], None]) -> None:
    """Write to `path`, or to another folder that has room: the weights of a long run must not be lost."""
    try:
        return write(path)
    except (OSError, RuntimeError) as cause:  # torch.save raises RuntimeError for a full disk
        problem = f"the weights cannot be written to '{path}': {cause}"
    for folder in (Path(tempfile.gettempdir()), Path.home(), Path.cwd()):
        rescued = folder / f"{path.stem}-{os.getpid()}{path.suffix}"
        try:
            if shutil.disk_usage(folder).free > size_bytes:
                write(rescued)
                raise PlannerError(f"{problem}; they are in '{rescued}'", hint="move them to where they belong")
        except (OSError, RuntimeError):
            continue  # the next folder
    raise PlannerError(f"{problem}; no other folder has room for them", hint="continue from the newest checkpoint")


def _pieces(held: _Held, own: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, from this worker or from the one that holds it."""
    if held.rank == 0:
        yield from (piece.numpy().data for piece in byte_pieces(own[held.fact.name]))
        return
    broadcast_bytes(json.dumps([held.rank, held.fact.name]).encode(), control_group())
    sizes = iter(held.fact.piece_sizes)
    try:
        for size in sizes:
            yield _received(size, held.rank)
    finally:
        for size in sizes:  # of a file that cannot be written on: the worker sends them all the same
            _received(size, held.rank)


def _received(size: int, rank: int) -> memoryview:
    room = torch.empty(size, dtype=torch.uint8)
    dist.recv(room, rank, control_group())
    return room.numpy().data


def _whole(held: _Held, own: Mapping[str, Tensor]) -> Tensor:
    content = bytearray()
    for piece in _pieces(held, own):  # each is good until the next one is taken
        content += piece
    found = torch.frombuffer(content, dtype=held.fact.dtype) if content else torch.empty(0, dtype=held.fact.dtype)
    return found.reshape(held.fact.shape)


@dataclass(frozen=True)
class Exported:
    """What `export_weights` wrote."""

    checkpoint: Path  # read
    path: Path  # written
    tensors: int  # parameters and buffers; tied ones count once for each of their names
    size_bytes: int  # of the file
    minibatch: int  # after which the checkpoint was written


def export_weights(checkpoint: str | Path, path: str | Path) -> Exported:
    """Write a checkpoint's parameters and buffers to one safetensors file, under the names in the model.

    The file has tied parameters under every name, so that `model.load_state_dict` accepts it.

    Args:
        checkpoint: a checkpoint, or a folder of checkpoints, whose newest is taken.
        path: of the file; an existing one is replaced.

    Raises:
        InputError: when there is no checkpoint, or a file of it is damaged.
        PlannerError: when the file cannot be written; an existing one is left as it was.
    """
    saved, path = load_checkpoint(find(Path(checkpoint))), Path(path)
    weights = dict(each_weight(saved.path, saved.first_replicas))
    try:
        with replacing(path) as temporary:
            written = write_tensors(temporary, weights)
    except OSError as cause:
        raise PlannerError(
            f"the weights cannot be written to '{path}': {cause.strerror or cause}", hint="choose another path"
        ) from None
    return Exported(saved.path, path, len(weights), written.size_bytes, saved.index.minibatch)


def read_trained(path: str | Path) -> dict[str, Tensor]:
    """Read parameters and buffers by their names in the model: a state dict for `model.load_state_dict`.

    Nothing that is read is ever executed.

    Args:
        path: a checkpoint or a folder of checkpoints, a .safetensors file, or a file that `save_weights` named.

    Raises:
        InputError: when there is no such file or folder, or it is damaged.
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        saved = load_checkpoint(find(path))
        return dict(each_weight(saved.path, saved.first_replicas))
    if path.suffix == SUFFIX:
        return read_tensors(path)
    state = None
    with suppress(OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError):
        state = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(
            f"'{path}' is no complete file of tensors",
            hint="give a checkpoint, a .safetensors file, or a file that training wrote with `save_weights`",
        )
    return state


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Overwrite all parameters and buffers of `model`, the user's own, unsplit model, with trained ones.

    Raises:
        InputError: when there are no weights at `path`, or they are damaged or another model's; `model` is then
            unchanged.
    """
    saved, own = read_trained(path), model.state_dict(keep_vars=True)
    # All checks come before the first copy, so that a failure leaves the model unchanged.
    for name in dict.fromkeys((*own, *saved)):
        if name not in saved or name not in own:
            where = "the model" if name in own else f"'{path}'"
            problem = f"'{name}' is only in {where}: '{path}' has the weights of another model"
        elif saved[name].shape != own[name].shape:
            shapes = f"{tuple(saved[name].shape)} in '{path}' and {tuple(own[name].shape)} in the model"
            problem = f"'{name}' has the shape {shapes}"
        else:
            continue
        raise InputError(problem, hint="build the model as the model file did when it was trained")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
