"""Write the whole model's weights from those of all workers, tensor by tensor, in bounded memory.

Rank 0 asks for the tensors in the order in which it writes them, so that none but the current one is on its way. A
safetensors file takes each at once. The format of `torch.save` cannot: for it, rank 0 holds the whole model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import PlannerError
from planner.executor.checkpoint.tensor_file import (
    SUFFIX,
    Fact,
    byte_pieces,
    dtype_name,
    dtype_of,
    write_pieces,
)
from planner.executor.checkpoint.write_parts import distinct
from planner.executor.communication.collect import gather_bytes
from planner.executor.communication.control import control_group
from planner.formats.files import replacing


@dataclass(frozen=True)
class _Held:
    """A tensor that a worker holds."""

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
    facts = [(name, dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in own.items()]
    parts = gather_bytes(json.dumps([facts, aliases]).encode())
    if dist.get_rank() != 0:
        _send_asked(own)
        return
    held: dict[str, _Held] = {}
    names: dict[str, str] = {}  # all of tied tensors, and whose values they have
    for rank, part in enumerate(parts):
        theirs, others = json.loads(part)
        # Stages that share a weight have equal copies: the last one's is taken.
        held |= {name: _Held(rank, Fact(name, dtype_of(dtype), tuple(shape))) for name, dtype, shape in theirs}
        names |= {name: name for name, _, _ in theirs} | others
    ordered = sorted(held.values(), key=lambda each: each.fact.order)

    def write(path: Path) -> None:
        with replacing(path) as temporary:
            if path.suffix == SUFFIX:
                with closing(_pieces(ordered, own)) as pieces:
                    write_pieces(temporary, [each.fact for each in ordered], pieces)
            else:
                tensors = {name: _whole(each, own) for name, each in held.items()}
                torch.save({name: tensors[first] for name, first in names.items()}, temporary)

    try:
        _write_somewhere(path, sum(each.fact.size_bytes for each in ordered), write)
    finally:
        _ask(None)


def _write_somewhere(path: Path, size_bytes: int, write: Callable[[Path], None]) -> None:
    """Write to `path`, or to another folder that has room: the weights of a long run must not be lost.

    Raises:
        PlannerError: when it is another folder.
    """
    try:
        write(path)
    except (OSError, RuntimeError) as cause:  # torch.save raises RuntimeError for a full disk
        problem = f"the weights cannot be written to '{path}': {cause}"
    else:
        return
    for folder in (Path(tempfile.gettempdir()), Path.home(), Path.cwd()):
        rescued = folder / f"{path.stem}-{os.getpid()}{path.suffix}"
        try:
            if shutil.disk_usage(folder).free > size_bytes:
                write(rescued)
                raise PlannerError(f"{problem}; they are in '{rescued}'", hint="move them to where they belong")
        except (OSError, RuntimeError):
            continue  # the next folder
    raise PlannerError(f"{problem}; no other folder has room for them", hint="continue from the newest checkpoint")


def _pieces(ordered: Sequence[_Held], own: Mapping[str, Tensor]) -> Generator[memoryview, None, None]:
    for each in ordered:
        yield from _pieces_of(each, own)


def _pieces_of(held: _Held, own: Mapping[str, Tensor]) -> Generator[memoryview, None, None]:
    """Yield the bytes of a tensor, from this worker or from the one that holds it."""
    if held.rank == 0:
        yield from (piece.numpy().data for piece in byte_pieces(own[held.fact.name]))
        return
    _ask(held)
    room = torch.empty(0, dtype=torch.uint8)
    sizes = iter(held.fact.piece_sizes)
    try:
        for size in sizes:
            room = room if len(room) == size else torch.empty(size, dtype=torch.uint8)
            dist.recv(room, held.rank, control_group())
            yield room.numpy().data
    finally:
        for size in sizes:  # of a file that cannot be written on: the worker sends them all the same
            dist.recv(torch.empty(size, dtype=torch.uint8), held.rank, control_group())


def _whole(held: _Held, own: Mapping[str, Tensor]) -> Tensor:
    content, done = bytearray(held.fact.size_bytes), 0
    for piece in _pieces_of(held, own):  # each is good until the next one is taken
        content[done : done + len(piece)] = piece
        done += len(piece)
    if not content:
        return torch.empty(held.fact.shape, dtype=held.fact.dtype)
    return torch.frombuffer(content, dtype=held.fact.dtype).reshape(held.fact.shape)


def _ask(held: _Held | None) -> None:
    """Ask the worker that holds a tensor to send it; None tells all workers that there is nothing more to send."""
    asked = [held.rank] if held is not None else range(1, dist.get_world_size())
    name = (held.fact.name if held is not None else "").encode()
    for rank in asked:
        dist.send(torch.tensor([len(name)]), rank, control_group())
        if name:
            dist.send(torch.frombuffer(bytearray(name), dtype=torch.uint8), rank, control_group())


def _send_asked(own: Mapping[str, Tensor]) -> None:
    """Send what rank 0 asks for, until it has everything."""
    size = torch.tensor([0])
    while True:
        dist.recv(size, 0, control_group())
        if not int(size):
            return
        name = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(name, 0, control_group())
        for piece in byte_pieces(own[name.numpy().tobytes().decode()]):
            dist.send(piece, 0, control_group())
