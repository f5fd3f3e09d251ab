"""Trained weights of the whole, unsplit model: written from those of all workers; read again, also
from a checkpoint.

At the end of a run rank 0 asks for one tensor after the other, in the order in which a safetensors
file has them, so that it holds no more than one. For the format of `torch.save` it holds the whole
model.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint import tensor_file
from planner.executor.checkpoint.folders import find, load_checkpoint
from planner.executor.checkpoint.stage_parts import each_weight
from planner.executor.communication.control import broadcast_bytes, control_group, gather_bytes
from planner.formats.files import check_regular, replacing


def save_gathered(state: Mapping[str, Tensor], path: Path) -> None:
    """Write the union of all workers' `state` on rank 0; all workers call it.

    The file is for `torch.load(path, weights_only=True)`, if it is no `.safetensors` file. Raise
    InputError for a dtype that such a file cannot hold, and PlannerError when it cannot be written,
    with where the weights are; an old file is left as it was.
    """
    group = control_group()
    described = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in state.items()
    ]
    parts = gather_bytes(json.dumps(described).encode())
    if dist.get_rank() != 0:
        _answer(state, group)
        return

    facts: dict[str, tensor_file.Fact] = {}
    rank_of: dict[str, int] = {}
    for rank, part in enumerate(parts):
        # Stages that share a weight have equal copies: the last one's is taken.
        for name, dtype, shape in json.loads(part):
            facts[name] = tensor_file.Fact(name, getattr(torch, dtype), tuple(shape))
            rank_of[name] = rank

    def tensor_of(fact: tensor_file.Fact) -> Tensor:
        rank = rank_of[fact.name]
        return state[fact.name] if rank == 0 else _ask(rank, fact, group)

    def write(path: Path) -> None:
        ordered = tensor_file.aligned(facts.values())
        with replacing(path) as temporary:
            if path.suffix == tensor_file.SUFFIX:
                tensor_file.write_each(temporary, ordered, map(tensor_of, ordered))
            else:
                torch.save({fact.name: tensor_of(fact) for fact in ordered}, temporary)

    try:
        _write_somewhere(path, sum(fact.size_bytes for fact in facts.values()), write)
    finally:
        broadcast_bytes(json.dumps(None).encode(), group)  # no more is asked for


def _ask(rank: int, fact: tensor_file.Fact, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that another worker has; all workers listen to what is asked for."""
    received = torch.empty(fact.size_bytes, dtype=torch.uint8)
    if fact.size_bytes:
        broadcast_bytes(json.dumps([rank, fact.name]).encode(), group)
        dist.recv(received, rank, group)
    return received.view(fact.dtype).reshape(fact.shape)


def _answer(state: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Send rank 0 the tensors that it asks this worker for, until it asks for no more."""
    while asked := json.loads(broadcast_bytes(b"", group)):
        rank, name = asked
        if rank == dist.get_rank():
            dist.send(tensor_file.bytes_of(state[name]), 0, group)


def _write_somewhere(path: Path, size_bytes: int, write: Callable[[Path], None]) -> None:
    """Write to `path`, or to another folder that has room: the weights of a long run must not be
    lost.
    """
    try:
        return write(path)
    except (OSError, RuntimeError) as cause:  # torch.save raises RuntimeError for a full disk
        problem = f"the weights cannot be written to '{path}': {cause}"

    for folder_here in (tempfile.gettempdir, Path.home, Path.cwd):
        with suppress(OSError, RuntimeError):  # the next folder
            folder = Path(folder_here())  # none, where no folder for temporary files takes any
            rescued = folder / f"{path.stem}-{os.getpid()}{path.suffix}"
            if shutil.disk_usage(folder).free > size_bytes:
                write(rescued)
                raise PlannerError(
                    f"{problem}; they are in '{rescued}'", hint="move them to where they belong"
                )

    raise PlannerError(
        f"{problem}; no other folder has room for them", hint="continue from the newest checkpoint"
    )


def read_trained(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict for `model.load_state_dict` from a checkpoint, a folder of them, or a file
    of weights.

    Nothing that is read is ever executed.
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        saved = load_checkpoint(find(path))
        return dict(each_weight(saved.path, saved.first_replicas))
    if path.suffix == tensor_file.SUFFIX:
        return dict(tensor_file.each_tensor(path))
    state = None
    with suppress(OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError):
        check_regular(path)
        state = torch.load(path, weights_only=True, map_location="cpu")

    if not isinstance(state, dict) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        hint = (
            "give a checkpoint, a .safetensors file, or a file that training wrote with "
            "`save_weights`"
        )
        raise InputError(f"'{path}' is no complete file of tensors", hint=hint)

    return state


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Overwrite all parameters and buffers of `model`, the user's own, unsplit model, with trained
    ones.

    Raises:
        InputError: when there are no weights at `path`, or they are damaged or another model's;
            `model` is then unchanged.
    """
    saved = read_trained(path)
    own = model.state_dict(keep_vars=True)
    # All checks come before the first copy, so that a failure leaves the model unchanged.
    for name in dict.fromkeys((*own, *saved)):
        if name not in saved or name not in own:
            problem = (
                f"'{name}' is only in {'the model' if name in own else repr(str(path))}: "
                f"are these its weights?"
            )
        elif saved[name].shape != own[name].shape:
            here = tuple(own[name].shape)
            there = tuple(saved[name].shape)
            problem = f"'{name}' has the shape {there} in '{path}' and {here} in the model"
        else:
            continue
        raise InputError(problem, hint="build the model as the model file did when it was trained")

    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
