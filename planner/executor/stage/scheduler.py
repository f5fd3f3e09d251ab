"""The user's scheduler of a stage's optimizer, some of whose steps are compared with those of one
process.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from planner.model.reference_optimizer import ReferenceOptimizer

_FIRST = 16  # steps at the beginning that are compared
_EVERY = 31  # later ones


class StageScheduler:
    """Steps the scheduler of a stage, and that of `reference` beside it.

    Raises:
        ModelFileError: where the stage's groups get other hyperparameters than in one process.
    """

    def __init__(
        self, scheduler: LRScheduler, optimizer: Optimizer, reference: ReferenceOptimizer
    ) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._reference = reference
        self._steps = 0
        reference.schedule()
        reference.check_schedule(optimizer)

    def step(self) -> None:
        """Move the learning rate on by one minibatch."""
        compares = self._steps < _FIRST or self._steps % _EVERY == 0
        self._steps += 1
        if compares:
            self._reference.follow(self._optimizer)

        with warnings.catch_warnings():
            # PyTorch warns when the first update was skipped; the schedule follows the data, not
            # the updates. The optimizer of the reference never steps.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self._scheduler.step()
            self._reference.step()

        if compares:
            self._reference.check_schedule(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's scheduler."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the state of the user's scheduler."""
        self._scheduler.load_state_dict(dict(state_dict))
        self._reference.load_scheduler(copy.deepcopy(self._scheduler.state_dict()))
