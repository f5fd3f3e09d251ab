"""Whether each module of a model trains: as its constructor left it, one by one.

People freeze a part by `eval()`: its dropout is off, and its BatchNorm uses the statistics that it
has. `train()` on the whole model would undo that. So training goes on in the modes that the model
came with, and evaluation gives them back.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn

Modes: TypeAlias = Sequence[tuple[nn.Module, bool]]

_log = logging.getLogger(__name__)
_SHOWN = 3


def modes_of(modules: Iterable[nn.Module]) -> Modes:
    """Return each of the modules, and those within them, with whether it trains."""
    every = dict.fromkeys(each for module in modules for each in module.modules())
    return [(each, each.training) for each in every]


def set_modes(modes: Modes) -> None:
    """Put modules into these modes."""
    for module, training in modes:
        if module.training != training:
            module.training = training


def is_training(model: nn.Module) -> bool:
    """Return whether some module trains; the modes of the others may differ."""
    return any(module.training for module in model.modules())


def put_in_training(model: nn.Module) -> None:
    """Put a model in training, but for modules that are in evaluation mode already; all are if none
    trains.

    Models override `train()` to keep some of their modules in evaluation mode, so it is called.
    """
    before = modes_of([model])
    model.train()
    if any(training for _, training in before):
        set_modes([(module, False) for module, training in before if not training])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules in evaluation mode, and each back in its own afterwards."""
    before = modes_of([model])
    model.eval()
    try:
        yield
    finally:
        set_modes(before)


def warn_of_modes(model: nn.Module) -> None:
    """Say which modules are in evaluation mode, or will be by the model's `train()`, and what
    training does with them.

    The modes stay as they are.
    """
    modes = [(path, module.training) for path, module in model.named_modules()]
    if not any(training for _, training in modes):
        _log.warning(
            f"warning: {type(model).__name__} was built in evaluation mode, and is put into "
            f"training mode as a whole; "
            "hint: to train in evaluation mode, call eval() on its submodules, not on itself"
        )
        return

    frozen = _outermost(path for path, training in modes if path and not training)
    if frozen:
        _log.warning(
            f"warning: {type(model).__name__} was built with {_shown(frozen)} in evaluation mode, "
            f"and trains so; hint: "
            "call train() in build_model() if it should not"
        )

    stopped = _outermost(_stopped_by_train(model))
    if stopped:
        _log.warning(
            f"warning: train() of {type(model).__name__} puts {_shown(stopped)} into evaluation "
            f"mode, where "
            "build_model() left it in training mode, and it trains in evaluation mode, as in a "
            "loop that calls "
            "model.train(); hint: if it should not, let train() leave it in training mode"
        )


def _stopped_by_train(model: nn.Module) -> list[str]:
    """Return the modules in training mode that the model's own `train()` puts into
    evaluation mode.
    """
    before = modes_of([model])
    trained = {module for module, training in before if training and module is not model}
    model.train()
    stopped = [
        path for path, module in model.named_modules() if module in trained and not module.training
    ]
    set_modes(before)
    return stopped


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths of modules that are in no other of these modules."""
    every = list(paths)
    return [path for path in every if not any(path.startswith(f"{other}.") for other in every)]


def _shown(paths: Sequence[str]) -> str:
    return ", ".join(f"'{path}'" for path in paths[:_SHOWN]) + (
        ", ..." if len(paths) > _SHOWN else ""
    )
