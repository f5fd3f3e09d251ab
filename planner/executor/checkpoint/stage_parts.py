"""Write each stage replica's part of a checkpoint, and restore stages from the parts that any plan
wrote.

What reads raises InputError for a checkpoint that does not fit, or a file that is not the one that
was written.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import InputError
from planner.executor.checkpoint.folders import SavedCheckpoint, StagePart
from planner.executor.checkpoint.optimizer_state import (
    SAME_OPTIMIZER,
    OptimizerState,
    from_json,
    give_state,
    rescale_rates,
    take_state,
    to_json,
)
from planner.executor.checkpoint.tensor_file import copy_of, each_tensor, opened, write_tensors
from planner.executor.communication.sharding import Sharding
from planner.executor.stage.optimizer import LossScaler
from planner.executor.stage.scheduler import StageScheduler
from planner.formats.files import replace
from planner.model.tensor.division import (
    divided_weights,
    is_divided,
    own_memory,
    own_rows,
    whole_state,
)

_MASTERED = {torch.float32, torch.bfloat16, torch.float16}
SAME_MODEL = "is it a checkpoint of this model?"


@dataclass
class Restorable:
    """What is saved and restored of one stage replica."""

    stage: int
    replica: int
    module: nn.Module
    optimizer: Optimizer | None
    learning_rate_factor: float = 1.0  # learning rate relative to the user's
    # how replicas divide the optimizer; None where each has all of it
    sharding: Sharding | None = None
    extras: Mapping[str, StageScheduler | LossScaler] = field(default_factory=dict)


class Content(NamedTuple):
    """What one stage replica saves."""

    weights: Mapping[str, Tensor]
    optimizer: OptimizerState | None
    optimizer_tensors: Mapping[str, Tensor]
    extras: dict[str, Any]


def content_of(own: Restorable) -> Content | None:
    """Return what is saved of one stage replica, if anything; all ranks that divide its weights
    call it.

    The first replica saves the parameters; each has its own buffers, and maybe its part of the
    optimizer's state.
    """
    first = own.replica == 0
    weights = whole_state(own.module, kept=first, masters=True)
    if not first:
        for name, _ in own.module.named_parameters(remove_duplicate=False):
            del weights[name]

    optimizer = None
    tensors = dict[str, Tensor]()
    if own.optimizer is not None and (
        first or (own.sharding is not None and own.sharding.has_own_part)
    ):
        optimizer, tensors = take_state(
            own.optimizer, own.module, own.learning_rate_factor, own.sharding
        )

    # The first rank saves the weights, and all of the optimizer of which this one has no part.
    leads = divided_weights(own.module).is_first_rank
    if not leads:
        weights = {}
        optimizer = optimizer if tensors else None

    stateful = own.extras if first and leads else {}
    extras = {
        name: to_json(each.state_dict(), f"the state of the {name}")
        for name, each in stateful.items()
    }
    if weights or optimizer is not None or extras:
        return Content(weights, optimizer, tensors, extras)
    return None


def write_part(folder: Path, own: Restorable, content: Content) -> StagePart:
    """Write the files of one stage replica to `folder`, and return what is in them; OSError when
    the disk is full.
    """
    division = divided_weights(own.module)
    stem = f"stage-{own.stage}" + (f"-replica-{own.replica}" if own.replica else "")
    if division.group is not None and not division.is_first_rank:
        stem += f"-rank-{division.group.place}"
    tensors, aliases = distinct(content.weights)
    weights = write_tensors(folder / f"{stem}.weights.safetensors", tensors)
    optimizer_file = None
    if content.optimizer is not None:
        optimizer_file = write_tensors(
            folder / f"{stem}.optimizer.safetensors", content.optimizer_tensors
        )

    return StagePart(
        stage=own.stage,
        replica=own.replica,
        weights=weights,
        aliases=aliases,
        optimizer=content.optimizer,
        optimizer_file=optimizer_file,
        extras=content.extras,
    )


def distinct(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor under its first name, and by further name of a tied tensor its
    first one.
    """
    first: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        # Not by identity: state_dict() detaches, so tied parameters come as several tensors over
        # one memory.
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor

    return tensors, aliases


def restore_stage(own: Restorable, saved: SavedCheckpoint) -> None:
    """Fill a stage replica from a checkpoint: weights, optimizer and what else it holds."""
    fill_module(own, saved)
    fill_optimizer(own, saved)

    # A stage without trained weights has a loss scale, too.
    groups = 0 if own.optimizer is None else len(own.optimizer.param_groups)
    for name, stateful in own.extras.items():
        state, before = _extra_state(saved, name, own.stage, groups)
        stateful.load_state_dict(rescale_rates(state, own.learning_rate_factor / before))


def fill_module(own: Restorable, saved: SavedCheckpoint) -> None:
    """Overwrite the parameters and buffers of a stage with the saved ones.

    Of a buffer that several parts have, the same replica's is taken, or else the first one's; among
    stages, the same stage's, or else the last one's.
    """
    # Later parts win.
    parts = sorted(
        saved.index.parts,
        key=lambda part: (part.replica == own.replica, part.replica == 0, part.stage == own.stage),
    )
    state = own.module.state_dict(keep_vars=True)
    division = divided_weights(own.module)
    missing = set(state)
    with torch.no_grad():
        for name, value in each_weight(saved.path, parts, set(state)):
            tensor = state[name]
            shape = division.whole_shape(name, tensor.shape)
            alike = value.dtype == tensor.dtype
            # Weights with masters are in half precision, and in float32 in a run without; the
            # masters come later.
            if value.shape != shape or not (alike or {value.dtype, tensor.dtype} < _MASTERED):
                there = f"{value.dtype} {tuple(value.shape)}"
                here = f"{tensor.dtype} {tuple(shape)}"
                problem = (
                    f"'{name}' is {there} in the checkpoint '{saved.path}', and {here} in the model"
                )
                raise InputError(problem, hint=SAME_MODEL)
            if is_divided(tensor):
                value = value[own_rows(tensor)]
            own_memory(tensor).copy_(part := division.part(name, value))
            if (
                own.sharding is not None
                and (shard := own.sharding.shards.get(tensor))
                and shard.is_master
            ):
                shard.stepped.copy_(shard.cut_from(part.to(shard.stepped)))
            missing.remove(name)

    if missing:
        raise InputError(
            f"the checkpoint '{saved.path}' has no '{min(missing)}', which the model has",
            hint=SAME_MODEL,
        )


def each_weight(
    path: Path, parts: Sequence[StagePart], names: set[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Read those of `names` that `parts` have, or all, tied ones under each name, one at a time;
    later parts win.
    """
    taken: set[str] = set()
    # File by file: each is hashed as a whole before anything is taken from it.
    for part in reversed(parts):
        called: dict[str, list[str]] = {}
        for name, stored in ({name: name for name in part.weights.tensors} | part.aliases).items():
            if name not in taken and (names is None or name in names):
                called.setdefault(stored, []).append(name)
                taken.add(name)
        if called:
            for stored, tensor in each_tensor(path / part.weights.name, called, part.weights):
                yield from ((name, tensor) for name in called[stored])


def fill_optimizer(own: Restorable, saved: SavedCheckpoint) -> None:
    """Restore the optimizer of a stage, or of the whole model; does nothing where there is none."""
    if own.optimizer is None:
        return
    parameters = dict(own.module.named_parameters(remove_duplicate=False))
    states: list[OptimizerState] = []
    files: dict[str, Any] = {}  # open, by the names of the tensors in them

    def read(name: str) -> Tensor:
        if name not in files:
            raise InputError(
                f"the checkpoint '{saved.path}' has no tensor '{name}'", hint=SAME_MODEL
            )
        return copy_of(files[name], name)

    with ExitStack() as stack:
        for part in sorted(saved.index.parts, key=lambda part: part.stage == own.stage):
            if part.optimizer is None or part.optimizer_file is None:
                continue
            if any(
                name in parameters for group in part.optimizer.groups for name in group.parameters
            ):
                here = {
                    name: state
                    for name, state in part.optimizer.states.items()
                    if name in parameters
                }
                states.append(replace(part.optimizer, states=here))
                file = stack.enter_context(
                    opened(saved.path / part.optimizer_file.name, part.optimizer_file)
                )
                files |= dict.fromkeys(part.optimizer_file.tensors, file)
        give_state(own.optimizer, own.module, states, read, own.learning_rate_factor, own.sharding)


def _extra_state(
    saved: SavedCheckpoint, name: str, stage: int, groups: int
) -> tuple[dict[str, Any], float]:
    # That of the same stage is preferred, but any will do: all have done the same minibatches.
    found = sorted(
        (part for part in saved.index.parts if name in part.extras),
        key=lambda part: part.stage != stage,
    )
    if not found:
        problem = (
            f"the checkpoint '{saved.path}' has no state of a {name}, which the model file has now"
        )
        raise InputError(problem, hint="give the model file what the run began with")

    state: dict[str, Any] = from_json(found[0].extras[name])
    rates = state.get("base_lrs")
    if rates is not None and len(rates) != groups:
        problem = (
            f"the {name} in the checkpoint '{saved.path}' has {len(rates)} groups, the "
            f"optimizer {groups}"
        )
        raise InputError(problem, hint=SAME_OPTIMIZER)

    return state, 1.0 if found[0].optimizer is None else found[0].optimizer.learning_rate_factor
