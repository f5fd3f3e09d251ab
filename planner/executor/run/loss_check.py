"""Compare, in some minibatches, the loss that is trained on with what the user's loss() makes of
the same outputs.

Profiles try a loss on few batches with weights of the beginning. A term that begins later, such as
a hinge on the mean of a batch, is in none of them, nor is an array that changes what loss() does.
So the last stage calls loss() itself in the first minibatches of a run, in a few later ones and in
the last:

1. on the output of a microbatch: what the captured layers made of it must be the same;
2. on the outputs of several microbatches together, or of one that replicas have by itself: that
   must be the mean, or the sum, of its parts that the plan says.

There are no gradients, and random numbers are left alone. The host compares when a device has come
so far. Not compared are losses that the model itself computes, and outputs whose samples are not
the entries of one dimension.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from planner.errors import ModelFileError, PlannerError, first_line
from planner.executor.communication.later import Reading
from planner.executor.run.some_minibatches import SomeMinibatches
from planner.formats.profile import LossMean
from planner.model.batch import Batch, part_of
from planner.model.loss import Shares, loss_of
from planner.model.options import ModuleOptions, autocasting
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec
from planner.model.stage.whole_output import WholeOutput
from planner.model.torch_private import tree_map_only
from planner.runtime import runtime_of
from planner.schedule.instructions import Unit

_log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 26  # of outputs that are kept for a minibatch, and of one that is compared
_SAME, _EPSILONS = 1e-4, 4  # relative to the loss: what rounding may change
_ELSEWHERE = 5e-3  # where the training computes on a GPU, or with compiled code
_SAME_IN_FLOAT64 = 1e-5
_TRIES, _ROUNDINGS = 3, 32  # of what a loss changes by where its inputs are rounded otherwise
_SAME_IN_FLOAT32 = 1e-3  # of a loss that does not run in float64, whose terms may cancel

_CHANGED_HINT = (
    "numbers and arrays stay as they were when the model was captured: let forward() count in a "
    "buffer, return it with "
    "the output, and plan one microbatch with `microbatches=1`"
)
_DIVIDED_HINT = (
    "plan one microbatch with `microbatches=1`, or take `schedule=1f1b`; if the loss is a mean "
    "over some of the "
    "labels, define loss_weight(target) and profile again; or train on the mean over microbatches "
    "with "
    "`accept_divided_loss`"
)

Output: TypeAlias = list[Any]  # leaves of the model's output
Part: TypeAlias = tuple[Batch, Output]


class LossCheck:
    """Compares losses at the last stage, for one worker.

    Args:
        spec: whose loss() is called.
        output: of the model, at this stage.
        options: of the captured layers.
        mean: what the plan says that the loss is a mean over.
        shares: how much each part of a minibatch counts; None where its division is not to be
            compared.
        captured: whether loss() was captured, and does not run as it is.
        last: the number of the run's last minibatch.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        output: WholeOutput,
        options: ModuleOptions,
        mean: LossMean,
        shares: Shares | None,
        *,
        captured: bool,
        last: int,
    ) -> None:
        assert spec.loss is not None
        self._spec = spec
        self._output = output
        self._options = options
        self._mean = mean
        self._shares = shares
        self._captured = captured
        self._some = SomeMinibatches(last)
        self._loss = options.loss(spec.loss)
        self._kept: list[Part] = []  # of the newest minibatch that is compared
        self._minibatch = -1
        self._units: list[Unit] = []  # of it
        self._compared: frozenset[Unit] = frozenset()  # the same
        self._readings: list[Reading] = []

    def see(
        self,
        unit: Unit,
        units_of: Callable[[int], Sequence[Unit]],
        batch: Batch | None,
        outputs: dict[str, Tensor],
        loss: Tensor,
    ) -> None:
        """Prepare to compare the loss of a microbatch, and take its output from `outputs`.

        Args:
            units_of: returns those of a minibatch that this worker computes, and that have samples;
                it is called once for each minibatch that is compared.
        """
        known = {name: outputs.pop(name).detach() for name in self._output.names if name in outputs}
        if unit.minibatch not in self._some:
            return
        if unit.minibatch != self._minibatch:
            self._minibatch = unit.minibatch
            self._units = list(units_of(unit.minibatch))
            self._compared = frozenset(self._units)
            self._kept.clear()

        if batch is None or unit not in self._compared:
            return
        try:
            with (
                torch.no_grad(),
                generators_kept(),
                runtime_of(loss.device).random_state_kept(loss.device),
            ):
                self._prepare(unit, self._units, batch, known, loss.detach())
        except PlannerError:
            raise
        # whatever the user's loss raises outside of a graph, or no memory for a second one
        except Exception as cause:
            _log.info("the loss of '%s' is not compared: %s", self._spec.origin, first_line(cause))

    def take_readings(self) -> list[Reading]:
        """Return what the host has to compare now, or when a device has computed it.

        Comparing raises a ModelFileError where loss() gives another loss.
        """
        taken = self._readings
        self._readings = []
        return taken

    def _prepare(
        self,
        unit: Unit,
        units: Sequence[Unit],
        batch: Batch,
        known: dict[str, Tensor],
        loss: Tensor,
    ) -> None:
        leaves = self._output.tensors(known, batch)
        size_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

        if self._captured and unit == units[0] and size_bytes <= _MOST_BYTES:
            self._prepare_captured(unit.minibatch, batch, leaves, loss)
        if self._shares is None or not self._output.divides:
            return

        # Some samples tell as well as all, and take less memory.
        samples = batch.size
        if size_bytes:
            samples = min(samples, _MOST_BYTES // len(units) * batch.size // size_bytes)
        if samples:
            few = range(samples)
            self._kept.append((part_of(batch, few).copied(), self._output.rows(leaves, few)))
        if unit == units[-1]:
            self._prepare_parts(unit.minibatch, self._parts(), self._shares)
            self._kept.clear()

    def _prepare_captured(self, minibatch: int, batch: Batch, leaves: Output, loss: Tensor) -> None:
        numbers = torch.stack([loss.double(), self._value(leaves, batch)])

        def compare(numbers: Tensor) -> None:
            captured, eager = numbers.tolist()
            if not math.isfinite(eager) or not math.isfinite(captured):
                return
            if not _differ(captured, eager, abs(eager), self._tolerance(loss.dtype)):
                return
            # Terms may cancel, as those of advantages in reinforcement learning do: then the loss
            # is all rounding.
            if self._draws(leaves, batch) or abs(captured - eager) <= self._rounding(
                (batch, leaves), loss.dtype
            ):
                return

            raise ModelFileError(
                f"minibatch {minibatch}: {self._spec.place('loss')} gives {eager:.6g} for the "
                f"model's output, and as "
                f"it was captured {captured:.6g}: what it reads has changed since",
                hint=_CHANGED_HINT,
            )

        self._readings.append((numbers, compare))

    def _parts(self) -> list[Part]:
        """Return what is put together: several microbatches, or halves of the only one."""
        if len(self._kept) != 1 or self._kept[0][0].size == 1:
            return list(self._kept)
        batch, leaves = self._kept[0]
        half = batch.size // 2
        ranges = range(half), range(half, batch.size)
        return [(part_of(batch, samples), self._output.rows(leaves, samples)) for samples in ranges]

    def _prepare_parts(self, minibatch: int, parts: list[Part], shares_of: Shares) -> None:
        if len(parts) < 2:
            return
        whole = self._output.joined([leaves for _, leaves in parts])
        together = _joined([batch for batch, _ in parts])
        shares = shares_of([batch for batch, _ in parts])
        if whole is None or together is None or not any(shares):
            return

        def compare(numbers: Tensor) -> None:
            undivided, divided, scale = numbers.tolist()
            if not math.isfinite(undivided) or not math.isfinite(divided):
                return
            if not _differ(divided, undivided, scale, self._tolerance()) or self._draws(
                whole, together
            ):
                return
            self._compare_in_float64(minibatch, (together, whole), parts, shares)

        self._readings.append((self._losses((together, whole), parts, shares), compare))

    def _compare_in_float64(
        self, minibatch: int, whole: Part, parts: list[Part], shares: Sequence[float]
    ) -> None:
        """Raise ModelFileError where losses differ by more than rounding; terms may cancel, so that
        much of it is.
        """
        tolerance = _SAME_IN_FLOAT64
        try:
            numbers = self._losses(
                _in_float64(whole), [_in_float64(part) for part in parts], shares
            )
        except Exception as cause:  # a loss that takes float32 alone
            _log.debug("the loss does not run in float64: %s", cause)
            tolerance = max(_SAME_IN_FLOAT32, self._tolerance())
            numbers = self._losses(whole, parts, shares)

        undivided, divided, scale = numbers.tolist()
        if _differ(divided, undivided, scale, tolerance):
            raise ModelFileError(
                f"minibatch {minibatch}: {self._spec.place('loss')} gives {undivided:.6g} for its "
                f"outputs together, "
                f"and {divided:.6g} as the {self._mean.words} of their parts, so "
                f"several microbatches would train on another loss",
                hint=_DIVIDED_HINT,
            )

    def _losses(self, whole: Part, parts: list[Part], shares: Sequence[float]) -> Tensor:
        """Return the undivided loss, the one that its parts add up to, and what rounding is
        relative to.
        """
        batch, leaves = whole
        undivided = self._value(leaves, batch)
        counted = [
            share * self._value(leaves, batch)
            for share, (batch, leaves) in zip(shares, parts, strict=True)
            if share
        ]
        parts_together = torch.stack(counted)
        scale = torch.maximum(undivided.abs(), parts_together.abs().sum())
        return torch.stack([undivided, parts_together.sum(), scale])

    def _value(self, leaves: Output, batch: Batch) -> Tensor:
        """Return the user's loss of an output, which may write to it."""
        with torch.no_grad():
            output = self._output.assembled(tree_map_only(Tensor, torch.clone, leaves))
            with autocasting(batch.device_type, self._options.autocast):
                return loss_of(output, batch.copied().target, self._loss).double()

    def _draws(self, leaves: Output, batch: Batch) -> bool:
        """Return whether the loss draws random numbers, which no graph and no part draws alike."""
        values = []
        device = next(
            (leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu")
        )
        with generators_kept(), runtime_of(device).random_state_kept(device):
            for seed in (0, 1, 0):
                torch.manual_seed(seed)
                values.append(float(self._value(leaves, batch)))

        first, other, again = values
        return first != other and first == again

    def _rounding(self, part: Part, dtype: torch.dtype) -> float:
        """Return what rounding allows, whatever the loss: some changes of it by those of its
        inputs' last digits.
        """
        generator = torch.Generator().manual_seed(0)
        digit = max(torch.finfo(each).eps for each in (*self._computed_in(dtype), torch.float32))

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            noise = torch.rand(leaf.shape, generator=generator).to(leaf.device) * 2 - 1
            return (leaf.double() * (1 + digit * noise)).to(leaf.dtype)

        def value_of(part: Part) -> float:
            batch, leaves = part
            return float(self._value(leaves, batch))

        loss = value_of(part)
        changes = [abs(value_of(_mapped(moved, part)) - loss) for _ in range(_TRIES)]
        return _ROUNDINGS * max(change for change in (*changes, 0.0) if math.isfinite(change))

    def _tolerance(self, *dtypes: torch.dtype) -> float:
        """Return what rounding allows, relative to the loss."""
        options = self._options
        least = _ELSEWHERE
        if options.device == "cpu" and not options.compiled:
            least = _SAME
        return max(
            [least, *(_EPSILONS * torch.finfo(dtype).eps for dtype in self._computed_in(*dtypes))]
        )

    def _computed_in(self, *dtypes: torch.dtype) -> list[torch.dtype]:
        return [
            each
            for each in (self._options.autocast, self._options.half, *dtypes)
            if each is not None
        ]


def _differ(one: float, other: float, scale: float, tolerance: float) -> bool:
    return abs(one - other) > tolerance * max(scale, torch.finfo(torch.float32).tiny)


def _in_float64(part: Part) -> Part:
    return _mapped(_doubled, part)


def _mapped(change: Callable[[Any], Any], part: Part) -> Part:
    """Return a part with other leaves of its batch and of its output."""
    batch, output = part
    leaves, structure = batch.flatten()
    return Batch(*structure.unflatten([change(leaf) for leaf in leaves])), [
        change(leaf) for leaf in output
    ]


def _doubled(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.double()
    return leaf


def _joined(batches: Sequence[Batch]) -> Batch | None:
    """Return the samples of batches together; None where they have other lengths, and would be
    padded.
    """
    columns = zip(*(batch.flatten()[0] for batch in batches), strict=True)
    leaves = []
    for column in columns:
        first = column[0]
        if isinstance(first, Tensor) and first.dim():
            if len({leaf.shape[1:] for leaf in column}) > 1:
                return None
            first = torch.cat(list(column))
        leaves.append(first)

    _, structure = batches[0].flatten()
    return Batch(*structure.unflatten(leaves))
