"""The loop of a PipelineTrainer: a step of the pipeline, and what a Trainer does around it.

The order of callbacks, logs, evaluations and checkpoints is that of `Trainer.train`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import TrainOutput, speed_metrics

from planner.integrations.trainer_checkpoints import set_generators
from planner.integrations.trainer_spec import Length, minibatches, pipeline_batch, stage_scheduler

if TYPE_CHECKING:
    from planner.executor.run.pipeline import Pipeline


class TrainerLoop:
    """Trains a pipeline as the trainer's arguments say.

    Args:
        trainer: a `PipelineTrainer`.
        loader: of the batches, which every worker reads alike.
        drawn: the states of the generators in the checkpoint that the run continues from.
    """

    def __init__(
        self,
        trainer: Trainer,
        pipeline: Pipeline,
        loader: Any,
        length: Length,
        drawn: Mapping[str, Any] | None = None,
    ) -> None:
        self._trainer = trainer
        self._pipeline = pipeline
        self._loader = loader
        self._length = length
        self._first = trainer.state.global_step
        self._logged = self._first  # updates whose losses were logged
        self._read = pipeline.minibatches  # losses before this minibatch were added up
        self._sum, self._count = 0.0, 0  # of losses since the last log
        self._total, self._losses = 0.0, 0  # of all losses
        self._rates = _Rates(trainer, length.updates, self._first)
        self._drawn = drawn
        self._began_s = time.time()

    def run(self) -> TrainOutput:
        """Train, and return what `Trainer.train` returns."""
        trainer = self._trainer
        handler = self._trainer.callback_handler
        handler.train_dataloader = self._loader
        trainer.control = handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        if trainer.args.eval_on_start:
            trainer.evaluate()

        per_epoch = self._length.updates_per_epoch
        epoch, skipped = divmod(self._first, per_epoch)
        while epoch < self._length.epochs and not trainer.control.should_training_stop:
            self._epoch(epoch, skipped)
            epoch += 1
            skipped = 0

        return self._end()

    def _epoch(self, epoch: int, skipped: int) -> None:
        """Train for an epoch, without its first `skipped` updates, those of an earlier run."""
        trainer = self._trainer
        handler = self._trainer.callback_handler
        args = trainer.args
        trainer.control = handler.on_epoch_begin(args, trainer.state, trainer.control)
        skipped = 0 if args.ignore_data_skip else skipped
        if skipped == 0:
            # before samplers and collators draw, as they drew in the run that goes on here
            self._set_generators()
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)

        each = args.gradient_accumulation_steps
        batches = self._length.batches_per_epoch
        for number, inputs in enumerate(minibatches(self._loader, each)):
            if number < skipped:
                continue
            self._set_generators()  # after the skipped batches were drawn
            trainer.control = handler.on_step_begin(args, trainer.state, trainer.control)
            self._step(inputs)
            trainer.state.epoch = epoch + min(batches, (number + 1) * each) / batches
            trainer.control = handler.on_step_end(args, trainer.state, trainer.control)
            self._report()
            if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                break

        trainer.control = handler.on_epoch_end(args, trainer.state, trainer.control)
        self._report()

    def _set_generators(self) -> None:
        """Let the generators go on from the checkpoint, once."""
        if self._drawn is not None:
            set_generators(self._drawn)
            self._drawn = None

    def _step(self, inputs: dict[str, Tensor]) -> None:
        trainer = self._trainer
        self._pipeline.step(pipeline_batch(inputs))
        self._rates.step()
        self._add_losses()
        trainer.state.total_flos += float(trainer.floating_point_ops(inputs))
        trainer.state.global_step += 1

    def _add_losses(self) -> None:
        """Add up the losses that have become known, of this step's minibatch or of earlier ones."""
        for minibatch, loss in sorted(self._pipeline.losses.items()):
            if minibatch < self._read:
                continue
            self._read = minibatch + 1
            if self._trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
                # as a Trainer does, the mean of those since the last log stands in
                loss = self._sum / (1 + self._count)
            self._sum += loss
            self._count += 1

    def _report(self) -> None:
        """Log, evaluate and save, where the callbacks have asked for it."""
        trainer = self._trainer
        control = self._trainer.control
        if control.should_log and trainer.state.global_step > self._logged:
            self._log()

        if control.should_evaluate:
            better = trainer.note_metric(trainer.evaluate())
            if trainer.args.save_strategy == "best":
                trainer.control.should_save = better

        if trainer.control.should_save:
            trainer.save_checkpoint()
            trainer.control = trainer.callback_handler.on_save(
                trainer.args, trainer.state, trainer.control
            )

    def _log(self) -> None:
        logs: dict[str, float] = {}
        if self._count:
            logs["loss"] = self._sum / self._count
        if self._pipeline.gradient_norm is not None:
            logs["grad_norm"] = self._pipeline.gradient_norm
        logs["learning_rate"] = self._rates.last
        self._settle()
        self._logged = self._trainer.state.global_step
        self._trainer.log(logs, self._began_s)

    def _settle(self) -> None:
        """Move the sum of losses since the last log to the sum of all."""
        self._total += self._sum
        self._losses += self._count
        self._sum = 0.0
        self._count = 0

    def _end(self) -> TrainOutput:
        trainer = self._trainer
        self._pipeline.drain()
        self._add_losses()
        self._settle()
        loss = self._total / max(1, self._losses)

        trained = trainer.state.global_step - self._first
        samples = trained * trainer.get_total_train_batch_size(trainer.args)
        metrics = speed_metrics("train", self._began_s, num_samples=samples, num_steps=trained)
        metrics |= {"total_flos": trainer.state.total_flos, "train_loss": loss}
        trainer.log(metrics)
        trainer.control = trainer.callback_handler.on_train_end(
            trainer.args, trainer.state, trainer.control
        )
        return TrainOutput(trainer.state.global_step, loss, metrics)


class _Rates:
    """The learning rates of a training, for its logs: not every worker has an optimizer."""

    def __init__(self, trainer: Trainer, updates: int, done: int) -> None:
        unused = nn.Parameter(torch.zeros(()))
        self._optimizer = torch.optim.SGD([unused], lr=trainer.args.learning_rate)
        self._scheduler = stage_scheduler(trainer, self._optimizer, updates)
        self.last = 0.0  # of the newest update
        self._optimizer.step()
        for _ in range(done):
            self.step()

    def step(self) -> None:
        self.last = float(self._scheduler.get_last_lr()[0])
        self._scheduler.step()
