"""Report the progress of a run to the user's hook and to TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.errors import InputError
from planner.executor.observe.measure import Progress, ProgressCallback
from planner.model.spec import TrainingSpec

EVERY_MINIBATCHES = 10  # between two losses in TensorBoard


def hook(spec: TrainingSpec) -> ProgressCallback | None:
    """Return a callback for the model file's on_update(minibatch, loss, metrics), if it has one."""
    if not spec.defines("on_update"):
        return None

    def call(progress: Progress) -> None:
        metrics: dict[str, float | None] = {}
        if progress.evaluation is not None:
            metrics = {"loss": progress.evaluation.loss, **progress.evaluation.metrics}
        spec.on_update(progress.minibatch, progress.loss, metrics)

    return call


def tensorboard(folder: str, first: int = 0) -> ProgressCallback:
    """Return a callback that writes losses, throughput and evaluations for TensorBoard.

    Args:
        first: minibatch that the run resumes from; what the folder has of later minibatches is no longer shown.

    Raises:
        InputError: when TensorBoard is not installed.
    """
    writer = check_tensorboard()(folder, purge_step=first + 1 if first else None)
    newest = -EVERY_MINIBATCHES

    def write(progress: Progress) -> None:
        nonlocal newest
        if progress.evaluation is not None:
            for name, value in {"loss": progress.evaluation.loss, **progress.evaluation.metrics}.items():
                if value is not None:
                    writer.add_scalar(f"evaluation/{name}", value, progress.minibatch)
            writer.flush()
        elif progress.minibatch >= newest + EVERY_MINIBATCHES or progress.minibatch == progress.minibatches:
            newest = progress.minibatch
            writer.add_scalar("training/loss", progress.loss, progress.minibatch)
            if progress.samples_per_s is not None:
                writer.add_scalar("training/samples_per_s", progress.samples_per_s, progress.minibatch)
            if progress.minibatch == progress.minibatches:
                writer.flush()

    return write


def all_of(*callbacks: ProgressCallback | None) -> ProgressCallback | None:
    """Return one callback that calls all of `callbacks`; None if there are none."""
    found = [callback for callback in callbacks if callback is not None]
    if not found:
        return None

    def call(progress: Progress) -> None:
        for callback in found:
            callback(progress)

    return call


def check_tensorboard() -> Callable[..., Any]:
    """Return TensorBoard's writer class; raise InputError when it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "`tensorboard` needs the package tensorboard, which is not installed", hint="pip install tensorboard"
        ) from None
    writer: Callable[..., Any] = SummaryWriter
    return writer
