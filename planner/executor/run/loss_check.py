"""Compare, in some minibatches, the loss that is trained on with what the user's loss() makes of the same outputs.

Profiles try a loss on few batches with weights of the beginning. A term that begins later, such as a hinge on the mean
of a batch, is in none of them, nor is a number of Python that changes what loss() does. So the last stage calls loss()
itself in the first minibatches of a run, in a few later ones and in the last:

1. on the output of a microbatch: what the captured layers made of it must be the same;
2. on the outputs of several microbatches together, or of one that replicas have by itself: that must be the mean, or
   the sum, of its parts that the plan says.

Both are on the CPU, where also the constants of loss() are, without gradients, and leave random numbers alone. Not
compared are losses that the model itself computes, and outputs whose samples are not the entries of one dimension.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from planner.errors import ModelFileError, PlannerError, first_line
from planner.executor.run.some_minibatches import SomeMinibatches
from planner.formats.profile import LossMean
from planner.model.batch import Batch, part_of
from planner.model.loss import Shares, loss_of
from planner.model.options import ModuleOptions, autocasting
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec
from planner.model.stage.whole_output import WholeOutput
from planner.schedule.instructions import Unit

_log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 26  # of outputs that are kept for a minibatch, and of one that is compared
_SAME, _EPSILONS = 1e-4, 4  # relative to the loss: what rounding may change
_ELSEWHERE = 5e-3  # where the training computes on a GPU, with kernels of other precision
_SAME_IN_FLOAT64 = 1e-5
_SAME_IN_FLOAT32 = 1e-3  # of a loss that does not run in float64, whose terms may cancel

_CHANGED_HINT = (
    "a number of Python stays as it was when the model was captured: let forward() count in a buffer, return it with "
    "the output, and plan one microbatch; or name parts that run as they are in blocks(model)"
)
_DIVIDED_HINT = (
    "plan one microbatch with `microbatches=1`, or take `schedule=1f1b`; if the loss is a mean over some of the "
    "labels, define loss_weight(target) and profile again; or train on the mean over microbatches with "
    "`accept_divided_loss`"
)


class LossCheck:
    """Compares losses at the last stage, for one worker.

    Args:
        spec: whose loss() is called.
        output: of the model, at this stage.
        options: of the captured layers.
        mean: what the plan says that the loss is a mean over.
        shares: how much each part of a minibatch counts; None where its division is not to be compared.
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
        self._spec, self._output, self._options = spec, output, options
        self._mean, self._shares = mean, shares
        self._captured = captured
        self._some = SomeMinibatches(last)
        self._loss = options.loss(spec.loss)
        self._kept: list[tuple[Batch, list[Any]]] = []  # of the newest minibatch that is compared
        self._minibatch = -1

    def see(
        self, unit: Unit, units: Sequence[Unit], batch: Batch | None, outputs: dict[str, Tensor], loss: Tensor
    ) -> None:
        """Compare the loss of a microbatch, of which `units` this worker computes; take its output from `outputs`.

        Raises:
            ModelFileError: where loss() gives another loss.
        """
        known = {name: outputs.pop(name).detach() for name in self._output.names if name in outputs}
        is_compared = unit.minibatch in self._some
        if batch is None or unit not in units or not is_compared:
            return
        try:
            with torch.no_grad(), generators_kept():
                self._compare(unit, units, batch, known, loss.detach())
        except (PlannerError, torch.OutOfMemoryError):
            raise
        except Exception as cause:  # whatever the user's loss raises outside of a graph
            _log.info("the loss of '%s' is not compared: %s", self._spec.origin, first_line(cause))

    def _compare(self, unit: Unit, units: Sequence[Unit], batch: Batch, known: dict[str, Tensor], loss: Tensor) -> None:
        if unit.minibatch != self._minibatch:
            self._minibatch = unit.minibatch
            self._kept.clear()
        leaves = self._output.tensors(known, batch)
        size_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

        if self._captured and unit == units[0] and size_bytes <= _MOST_BYTES:
            self._compare_with_captured(unit, batch, leaves, loss)
        if self._shares is None or not self._output.divides:
            return

        # Some samples tell as well as all, and take less memory.
        samples = batch.size
        if size_bytes:
            samples = min(samples, _MOST_BYTES // len(units) * batch.size // size_bytes)
        if samples:
            few = range(samples)
            self._kept.append((_on_host(part_of(batch, few)), _on_host(self._output.rows(leaves, few))))
        if unit == units[-1]:
            self._compare_parts(unit.minibatch, self._parts(), self._shares)
            self._kept.clear()

    def _compare_with_captured(self, unit: Unit, batch: Batch, leaves: list[Any], loss: Tensor) -> None:
        leaves, batch = _on_host(leaves), _on_host(batch)
        eager, captured = self._value(leaves, batch), float(loss)
        if not math.isfinite(eager) or not math.isfinite(captured):
            return
        if not _differ(captured, eager, abs(eager), self._tolerance(loss)) or self._draws(leaves, batch):
            return
        raise ModelFileError(
            f"minibatch {unit.minibatch}: {self._spec.place('loss')} gives {eager:.6g} for the model's output, and "
            f"as it was captured {captured:.6g}: what it reads has changed since",
            hint=_CHANGED_HINT,
        )

    def _parts(self) -> list[tuple[Batch, list[Any]]]:
        """Return what is put together: several microbatches, or halves of the only one."""
        if len(self._kept) != 1 or self._kept[0][0].size == 1:
            return self._kept
        batch, leaves = self._kept[0]
        half = batch.size // 2
        ranges = range(half), range(half, batch.size)
        return [(part_of(batch, samples), self._output.rows(leaves, samples)) for samples in ranges]

    def _compare_parts(self, minibatch: int, parts: list[tuple[Batch, list[Any]]], shares_of: Shares) -> None:
        if len(parts) < 2:
            return
        whole = self._output.joined([leaves for _, leaves in parts])
        together = _joined([batch for batch, _ in parts])
        shares = shares_of([batch for batch, _ in parts])
        if whole is None or together is None or not any(shares):
            return
        undivided, divided, scale = self._losses(whole, together, parts, shares)
        if not math.isfinite(undivided) or not math.isfinite(divided):
            return
        if not _differ(divided, undivided, scale, self._tolerance(None)) or self._draws(whole, together):
            return

        # Terms may cancel, so that rounding is much of what is left.
        tolerance = _SAME_IN_FLOAT64
        try:
            doubled = [(_in_float64(batch), _in_float64(leaves)) for batch, leaves in parts]
            undivided, divided, scale = self._losses(_in_float64(whole), _in_float64(together), doubled, shares)
        except Exception as cause:  # a loss that takes float32 alone
            _log.debug("the loss does not run in float64: %s", cause)
            tolerance = max(_SAME_IN_FLOAT32, self._tolerance(None))
        if _differ(divided, undivided, scale, tolerance):
            raise ModelFileError(
                f"minibatch {minibatch}: {self._spec.place('loss')} gives {undivided:.6g} for its outputs together, "
                f"and {divided:.6g} as the {self._mean.words} of their parts, so divided minibatches would train on "
                "another loss",
                hint=_DIVIDED_HINT,
            )

    def _losses(
        self, whole: list[Any], together: Batch, parts: list[tuple[Batch, list[Any]]], shares: Sequence[float]
    ) -> tuple[float, float, float]:
        """Return the undivided loss, the one that its parts add up to, and what rounding is relative to."""
        counted = [
            share * self._value(leaves, batch) for share, (batch, leaves) in zip(shares, parts, strict=True) if share
        ]
        undivided = self._value(whole, together)
        scale = max(abs(undivided), math.fsum(map(abs, counted)))
        return undivided, math.fsum(counted), scale

    def _value(self, leaves: list[Any], batch: Batch, seed: int = 0) -> float:
        """Return the user's loss of an output, which may write to it."""
        torch.manual_seed(seed)
        output = self._output.assembled(tree_map_only(Tensor, torch.clone, leaves))
        autocast = self._options.autocast if self._options.device == "cpu" else None
        with autocasting("cpu", autocast):
            return float(loss_of(output, batch.copied().target, self._loss))

    def _draws(self, leaves: list[Any], batch: Batch) -> bool:
        """Return whether the loss draws random numbers, which no graph and no part draws alike."""
        first, other, again = (self._value(leaves, batch, seed) for seed in (0, 1, 0))
        return first != other and first == again

    def _tolerance(self, loss: Tensor | None) -> float:
        """Return what rounding allows, relative to the loss: of `loss`, or of one in float32."""
        options = self._options
        dtypes = [options.autocast, options.half, None if loss is None else loss.dtype]
        rounding = [_EPSILONS * torch.finfo(dtype).eps for dtype in dtypes if dtype is not None]
        least = _SAME if options.device == "cpu" and not options.compiled else _ELSEWHERE
        return max(least, *rounding) if rounding else least


def _differ(one: float, other: float, scale: float, tolerance: float) -> bool:
    return abs(one - other) > tolerance * max(scale, torch.finfo(torch.float32).tiny)


def _on_host(value: Any) -> Any:
    if isinstance(value, Batch):
        return value.to("cpu").copied()
    return tree_map_only(Tensor, _copied_to_host, value)


def _copied_to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU; of low precision in float32 if it was elsewhere, where autocast computes with it."""
    copied = tensor.detach().to("cpu", copy=True)
    is_low = copied.dtype in (torch.bfloat16, torch.float16)
    return copied.float() if is_low and tensor.device.type != "cpu" else copied


def _in_float64(value: Any) -> Any:
    if isinstance(value, Batch):
        leaves, structure = value.flatten()
        return Batch(*structure.unflatten(_in_float64(leaves)))
    return tree_map_only(Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, value)


def _joined(batches: Sequence[Batch]) -> Batch | None:
    """Return the samples of batches together; None where they have other lengths, and would be padded."""
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
