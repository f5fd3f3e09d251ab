"""The groups of parameters that one process would have: those of every stage are compared with
them.

The user's optimizer() and scheduler() run in each worker, and may look at RANK, WORLD_SIZE, the
process group or, in the scheduler, the weights of the stage. Then a worker has another rate than
one process, without an error. So each stage has a second optimizer and scheduler, made as by one
process: see `planner.model.one_process`. The second optimizer steps nothing. It has no parameters,
unless the stage has all parameters of the model, undivided: then a scheduler may look at them.

optimizer() gets copies of the stage's parameters here: one that registers hooks on parameters, or
scales them, does so once to those that are trained.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import InputError, ModelFileError
from planner.model.hyperparameters import (
    first_difference,
    group_numbers,
    groups_digest,
    hyperparameters_of,
    shown,
)
from planner.model.one_process import as_one_process
from planner.model.optimizer_part import TrainedParameter, leave_out, named_parameters
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec

_HINT = (
    "let optimizer() and scheduler() look neither at RANK or WORLD_SIZE, nor at the weights, the "
    "clock or the host: "
    "planner averages gradients over replicas and splits minibatches itself, so rates are those "
    "of one process"
)


class ReferenceOptimizer:
    """What optimizer() and scheduler() return in one process.

    Args:
        whole: all trained parameters of the model.
        part: those of this stage, by name; a stand-in for the whole of a weight that ranks divide.
        learning_rate_factor: by which the stage multiplies all rates.
        divided: whether replicas or ranks divide the stage's parameters.

    Attributes:
        digest: of the groups as optimizer() returned them, equal for all stages and workers.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        whole: Iterable[TrainedParameter],
        part: Mapping[str, nn.Parameter],
        learning_rate_factor: float,
        *,
        divided: bool = False,
    ) -> None:
        self._spec = spec
        self._factor = learning_rate_factor
        self._scheduler: LRScheduler | None = None
        named, absent = named_parameters(whole, part)
        stand_ins = set(map(id, absent))
        copies = {
            name: each if id(each) in stand_ins else _copy(each) for name, each in named.items()
        }
        with as_one_process(), generators_kept():
            self._optimizer = spec.optimizer(copies)
        self._names = named.keys()
        self._numbers = group_numbers(self._optimizer, copies)
        self.digest = groups_digest(self._optimizer, self._numbers)
        if absent or divided:
            leave_out(self._optimizer, list(copies.values()))
        else:
            self._take({copies[name]: named[name] for name in named})

    def check_groups(self, optimizer: Optimizer, part: Mapping[str, nn.Parameter]) -> None:
        """Raise ModelFileError where the stage's optimizer, as optimizer() returned it, has other
        groups.

        Args:
            part: the parameters of this stage, by name.
        """
        numbers = group_numbers(optimizer, part)
        # Under its other names a tied parameter is in no group of the reference.
        for name in part.keys() & self._names:
            if numbers.get(name) != self._numbers.get(name):
                raise ModelFileError(
                    f"optimizer() puts '{name}' into another group in this worker than in one "
                    f"process",
                    hint=_HINT,
                )

        self._check(optimizer, "optimizer()")

    def schedule(self) -> None:
        """Make the scheduler, for rates that are multiplied by the stage's factor.

        Raises:
            InputError: for a scheduler whose rates do not depend on those of the optimizer.
        """
        plain = self._plain_rates() if self._factor != 1 else None
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * self._factor
        with as_one_process(), generators_kept():
            self._scheduler = self._spec.scheduler(self._optimizer)
        if plain is not None:
            self._check_rates(plain)

    def _plain_rates(self) -> list[float]:
        """Return the rates that the groups begin with where nothing multiplies them."""
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        with as_one_process(), generators_kept():
            self._spec.scheduler(self._optimizer)
        rates = [float(group["lr"]) for group in groups]
        for group, values in zip(groups, before, strict=True):
            group.clear()
            group.update(values)
        return rates

    def _check_rates(self, plain: Sequence[float]) -> None:
        """Raise InputError where the scheduler has not multiplied the stage's own rates."""
        for rate, group in zip(plain, self._optimizer.param_groups, strict=True):
            if not math.isclose(group["lr"], self._factor * rate, rel_tol=1e-6, abs_tol=1e-30):
                raise InputError(
                    f"{type(self._scheduler).__name__}, which scheduler() returns, begins with a "
                    f"learning rate of {group['lr']:g} whatever optimizer() has, so that "
                    f"`late_lr` and `scale_lr` change nothing",
                    hint="leave both out, or return a scheduler that multiplies the rates of the "
                    "optimizer, such as LinearLR or LambdaLR",
                )

    def check_schedule(self, optimizer: Optimizer) -> None:
        """Raise ModelFileError where the stage's scheduler has given the groups other
        hyperparameters.
        """
        self._check(optimizer, "scheduler()")

    def follow(self, optimizer: Optimizer) -> None:
        """Take the stage's hyperparameters, which the optimizer's own steps may have changed."""
        for own, group in zip(self._optimizer.param_groups, optimizer.param_groups, strict=True):
            own.update(hyperparameters_of(group))

    def step(self) -> None:
        """Step the scheduler."""
        assert self._scheduler is not None
        with as_one_process(), generators_kept():
            self._scheduler.step()

    def load_scheduler(self, state: Mapping[str, object]) -> None:
        """Continue where a checkpoint has left the stage's scheduler."""
        assert self._scheduler is not None
        self._scheduler.load_state_dict(dict(state))

    def _take(self, originals: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Put the stage's parameters in place of their copies, without the state that Adagrad has
        from the start.
        """
        for group in self._optimizer.param_groups:
            group["params"] = [originals[copy] for copy in group["params"]]
        for copied in originals:
            self._optimizer.state.pop(copied, None)

    def _check(self, optimizer: Optimizer, who: str) -> None:
        groups = optimizer.param_groups
        expected = self._optimizer.param_groups
        if len(groups) != len(expected):
            raise ModelFileError(
                f"optimizer() makes {len(groups)} groups of parameters in this worker, and "
                f"{len(expected)} in one "
                "process",
                hint=_HINT,
            )

        for number, (group, reference) in enumerate(zip(groups, expected, strict=True)):
            own = hyperparameters_of(group)
            other = hyperparameters_of(reference)
            name = first_difference(own, other)
            if name is not None:
                raise ModelFileError(
                    f"{who} gives group {number} of the parameters the `{name}` "
                    f"{shown(own.get(name))} in this "
                    f"worker, and {shown(other.get(name))} in one process",
                    hint=_HINT,
                )


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same values, with the user's attributes and no hooks."""
    copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    vars(copied).update(vars(parameter))
    return copied
