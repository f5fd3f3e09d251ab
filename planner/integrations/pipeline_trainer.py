"""The Trainer of transformers, whose model is a pipeline: `PipelineTrainer`.

A Trainer puts the whole model on each process's device and gives each process other samples. Here
every worker has the stages that the plan gives it, and all read the same samples. So the loop, the
loaders, the optimizer, evaluation and checkpoints are replaced, and what a Trainer does around them
stays: its arguments, callbacks, loggers, progress bar and the folder that `save_model` writes.

What is replaced are public methods and the two hooks `_move_model_to_device` and `_save`. Read in
transformers 5.24; `tests/integrations` trains beside a Trainer of the release that is installed.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import (
    EvalPrediction,
    TrainOutput,
    denumpify_detensorize,
    speed_metrics,
)

from planner.api.running import profile as profile_model
from planner.errors import InputError
from planner.executor.communication.control import control_group, share
from planner.executor.run.pipeline import Pipeline, pipeline
from planner.formats.plan import Plan, load_plan
from planner.formats.profile import Profile
from planner.integrations.trainer_accumulation import check_accumulation
from planner.integrations.trainer_arguments import (
    check_arguments,
    check_callback,
    check_constructor,
    check_methods,
    check_plan,
)
from planner.integrations.trainer_callbacks import PipelineCallbacks
from planner.integrations.trainer_checkpoints import (
    CHECKPOINT,
    PIPELINE,
    STATE,
    checkpoint_to_resume,
    read_generators,
    remove_checkpoints,
    write_generators,
)
from planner.integrations.trainer_loop import TrainerLoop
from planner.integrations.trainer_predictions import gather_predictions, predictions_of
from planner.integrations.trainer_spec import (
    BATCH_LOSS,
    LOSS,
    length_of,
    pipeline_batch,
    tensors_of,
    training_spec,
)

_log = logging.getLogger(__name__)


class PipelineTrainer(Trainer):  # type: ignore[misc]  # its types are not checked
    """A Trainer whose model is a pipeline; every worker of the plan makes the same one.

    Args:
        plan: from `planner.solve`, or the path of its file. Without one there is only `profile`.
        given, others: as `transformers.Trainer` takes them.

    Raises:
        InputError: for arguments of a Trainer that a pipeline cannot follow, each with what to do
            instead.

    Example:
        >>> trainer = planner.PipelineTrainer(model, args, train_dataset=data, plan="plan.json")
        >>> trainer.train()
    """

    def __init__(self, *given: Any, plan: Plan | str | Path | None = None, **others: Any) -> None:
        check_constructor(others)
        check_methods(self, PipelineTrainer, Trainer)
        self._plan = load_plan(plan) if isinstance(plan, str | Path) else plan
        self._pipeline: Pipeline | None = None
        self._outputs: list[Any] = []  # of the last stage, in an evaluation
        self._trained = False
        self._saved_to: set[Path] = set()  # folders of the pipeline's checkpoints of this run
        super().__init__(*given, **others)
        check_arguments(self.args)
        handler: Any = self.callback_handler
        self.callback_handler: PipelineCallbacks = PipelineCallbacks(handler)
        self._check_callbacks()
        if self._plan is not None:
            check_plan(self._plan, self.args)
            check_accumulation(self)

    def _check_callbacks(self) -> None:
        for callback in self.callback_handler.callbacks:
            check_callback(callback)

    # ---- What a plan is made from ----

    def profile(self, **options: Any) -> Profile:
        """Measure what each layer of the model costs on this device, in one process.

        Args:
            options: as `planner.profile` takes them; `batch_size` defaults to
                per_device_train_batch_size.
        """
        length = length_of(self, self.get_train_dataloader())
        size = options.pop("batch_size", self.args.per_device_train_batch_size)
        return profile_model(training_spec(self, length.updates), batch_size=size, **options)

    # ---- Training ----

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as the plan and the arguments say.

        Under synchronous schedules losses are those of a Trainer in one process, up to rounding.
        Under asynchronous schedules gradients are stale, and logged losses are of earlier updates.

        Args:
            resume_from_checkpoint: a folder that this class wrote, or True for the newest.
        """
        if trial is not None or self._trained:
            raise InputError(
                "a PipelineTrainer trains once, and searches no hyperparameters",
                hint="make a new one, in a new process",
            )

        check_methods(self, PipelineTrainer, Trainer)  # set since this was made, as are callbacks
        self._check_callbacks()
        if self._plan is not None and (self._evaluates_along or self.args.eval_on_start):
            self._check_evaluation(self._plan)  # now, and not after an epoch
        self._trained = True
        loader = self.get_train_dataloader()
        length = length_of(self, loader)
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)

        self.state = self._state_for(length.updates, length.epochs, checkpoint)
        built = self._built()
        drawn = None
        if checkpoint is not None:
            built.load_checkpoint(checkpoint / PIPELINE)
            drawn = read_generators(checkpoint)

        _warn_of_staleness(built.plan)
        self.callback_handler.hide_optimizer()
        self.is_in_train = True
        answer = TrainerLoop(self, built, loader, length, drawn).run()
        self.is_in_train = False
        return answer

    def _state_for(self, updates: int, epochs: int, checkpoint: Path | None) -> TrainerState:
        """Return the state to begin with: a new one, or that of a checkpoint."""
        if checkpoint is None:
            control = [self.control, *self.callback_handler.callbacks]
            state = TrainerState(
                stateful_callbacks=[each for each in control if isinstance(each, ExportableState)]
            )
        else:
            state = TrainerState.load_from_json(str(checkpoint / STATE))

        state.max_steps = updates
        state.num_train_epochs = epochs
        state.train_batch_size = self.args.train_batch_size
        state.compute_steps(self.args, updates)
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()
        return state

    def _built(self) -> Pipeline:
        """Return the pipeline, which is built when it is first needed and ends with the process."""
        if self._pipeline is not None:
            return self._pipeline
        if self._plan is None:
            raise InputError(
                "this PipelineTrainer has no plan",
                hint="profile() measures the model, `plan solve` makes a plan, and `plan` takes it",
            )

        updates = 0
        if self.train_dataset is not None:
            updates = length_of(self, self.get_train_dataloader()).updates
        spec = training_spec(self, updates, self._outputs.append if self._predicts else None)
        norm = self.args.max_grad_norm or None
        made = pipeline(
            self._plan,
            spec,
            seed=self.args.seed,
            device="cpu" if self.args.device.type == "cpu" else None,
            clip_grad_norm=norm,
            evaluates=self.eval_dataset is not None,
        )
        self._pipeline = made.__enter__()
        atexit.register(self._leave)
        # The stages have the weights. These would stay what they are, and callbacks read them.
        self.model.to("meta")
        self.callback_handler.watch(self.model)
        return self._pipeline

    def end(self) -> None:
        """Leave the other workers, and do what `Trainer.end` does; all workers call it.

        Without it they leave when their scripts end.
        """
        self._leave()
        super().end()

    def _leave(self) -> None:
        """Leave the pipeline, as the end of its `with` would, with the error that ends the
        script.
        """
        left = self._pipeline
        self._pipeline = None
        if left is None:
            return
        error = getattr(sys, "last_value", None)
        kind = None if error is None else type(error)
        left.__exit__(kind, error, getattr(error, "__traceback__", None))

    # Without a GPU accelerate takes each worker for a process of its own, all of which are the
    # first.

    def is_world_process_zero(self) -> bool:
        """Return whether this is the first worker, which logs and writes files."""
        return os.environ.get("RANK", "0") == "0"

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first worker of its host."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    # ---- Data: every worker reads all of it ----

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of a Trainer in one process."""
        with self._as_one_process():
            return cast("DataLoader[Any]", super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of a Trainer in one process."""
        with self._as_one_process():
            return cast("DataLoader[Any]", super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of a Trainer in one process."""
        with self._as_one_process():
            return cast("DataLoader[Any]", super().get_test_dataloader(test_dataset))

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of an update, which workers do not have more of."""
        return int(args.train_batch_size * args.gradient_accumulation_steps)

    @contextmanager
    def _as_one_process(self) -> Iterator[None]:
        """Let accelerate prepare loaders as it does in one process."""
        settings = self.accelerator.dataloader_config

        def prepare(loader: DataLoader[Any]) -> Any:
            return prepare_data_loader(
                loader,
                num_processes=1,
                process_index=0,
                put_on_device=False,
                use_seedable_sampler=settings.use_seedable_sampler,
                data_seed=settings.data_seed,
            )

        with patch.object(self.accelerator, "prepare", prepare):
            yield

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the whole model where it is: the pipeline moves its stages."""

    # ---- Evaluation ----

    @property
    def _evaluates_along(self) -> bool:
        """Whether the training is evaluated by the arguments."""
        return str(self.args.eval_strategy.value) != "no"

    @property
    def _predicts(self) -> bool:
        """Whether an evaluation needs the model's outputs."""
        return self.compute_metrics is not None and not self.args.prediction_loss_only

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate the newest weights in the pipeline; all workers call it.

        Returns:
            The mean loss over samples, what `compute_metrics` returns, and speeds, as Trainer names
            them.

        Raises:
            InputError: for batches larger than the plan's microbatches, or for `compute_metrics`
                where a replica of the last stage shards its predictions over workers.
        """
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, Mapping):
            found: dict[str, float] = {}
            for name, dataset in given.items():
                prefix = f"{metric_key_prefix}_{name}"
                found |= self.evaluate(dataset, ignore_keys, prefix)
            return found

        began_s = time.time()
        if self._plan is not None:
            self._check_evaluation(self._plan)
        built = self._built()
        batches = self._evaluation_batches(eval_dataset)
        self._outputs.clear()
        evaluation = built.evaluate(map(pipeline_batch, batches))
        metrics = self._computed_metrics(built.plan, batches, ignore_keys)
        metrics["loss"] = cast("float", evaluation.metrics[BATCH_LOSS])

        named = {
            name
            if name.startswith(f"{metric_key_prefix}_")
            else f"{metric_key_prefix}_{name}": each
            for name, each in metrics.items()
        }
        named |= speed_metrics(
            metric_key_prefix, began_s, num_samples=evaluation.samples, num_steps=len(batches)
        )
        self.log(named)
        handler = self.callback_handler
        self.control: Any = handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def _check_evaluation(self, plan: Plan) -> None:
        """Raise InputError for an evaluation that the pipeline was not built for, or cannot do."""
        if self.eval_dataset is None:
            raise InputError(
                "this PipelineTrainer was made without an eval_dataset, so its stages do not "
                "evaluate",
                hint="give PipelineTrainer one; evaluate() may take another",
            )

        if self._predicts and len(self.label_names) != 1:
            raise InputError(
                f"compute_metrics needs one kind of labels, and label_names are {self.label_names}",
                hint="give label_names=['labels'], or leave compute_metrics out",
            )

        size = self.args.eval_batch_size
        if plan.microbatch_size is not None and size > plan.microbatch_size:
            raise InputError(
                f"per_device_eval_batch_size={size} is more than a microbatch of the plan",
                hint=f"give per_device_eval_batch_size={plan.microbatch_size} or less",
            )

        last = plan.stages[-1]
        if self._predicts and last.replicas != len(last.ranks):
            raise InputError(
                f"compute_metrics needs whole predictions, and each replica of the last stage of "
                f"'{plan.config}' shards them over {last.ranks_per_replica} workers",
                hint="leave compute_metrics out, or solve with `tensor=1` and `context=1`",
            )

    def _evaluation_batches(self, dataset: Any) -> list[dict[str, Tensor]]:
        loader = self.get_eval_dataloader(dataset)
        self.callback_handler.eval_dataloader = loader
        batches = []
        for batch in loader:
            batches.append(tensors_of(batch))
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )

        return batches

    def _computed_metrics(
        self, plan: Plan, batches: Sequence[Mapping[str, Tensor]], ignore_keys: list[str] | None
    ) -> dict[str, float]:
        """Return what `compute_metrics` makes of all predictions, on all workers."""
        if not self._predicts:
            return {}
        (name,) = self.label_names
        labels = [batch[name] for batch in batches]
        ranks = plan.stages[-1].ranks
        rank = int(os.environ.get("RANK", "0"))
        gathered: list[Tensor] = []
        if rank in ranks:
            predictions = predictions_of(
                self._outputs,
                labels[ranks.index(rank) :: len(ranks)],
                (*self._ignored(ignore_keys), LOSS),
                self.preprocess_logits_for_metrics,
            )
            gathered = gather_predictions(predictions, ranks)

        text = ""
        if gathered:
            both = EvalPrediction(torch.cat(gathered).numpy(), torch.cat(labels).numpy())
            text = json.dumps(denumpify_detensorize(self.compute_metrics(both)))

        shared = next(filter(None, share(text, control_group())))
        return cast("dict[str, float]", json.loads(shared))

    def _ignored(self, ignore_keys: list[str] | None) -> Sequence[str]:
        """Return the names of outputs that are no predictions, as Trainer has it."""
        if ignore_keys is not None:
            return ignore_keys
        config = getattr(self.model, "config", None)
        return cast("Sequence[str]", getattr(config, "keys_to_ignore_at_inference", []))

    def predict(self, *given: Any, **others: Any) -> Any:
        """Refuse: predictions stay in the last stage's worker.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a PipelineTrainer does not predict",
            hint="save_model() writes the whole model: load it with from_pretrained()",
        )

    def note_metric(self, metrics: Mapping[str, float]) -> bool:
        """Return whether metric_for_best_model is the best so far, which the state then knows.

        Raises:
            InputError: where there is no such metric.
        """
        wanted = self.args.metric_for_best_model
        if wanted is None:
            return False
        name = wanted
        if not wanted.startswith("eval_"):
            name = f"eval_{wanted}"
        if name not in metrics:
            raise InputError(
                f"metric_for_best_model='{wanted}' is not among {', '.join(sorted(metrics))}",
                hint="give one of these",
            )

        value = metrics[name]
        best = self.state.best_metric
        better = best is None or (value > best if self.args.greater_is_better else value < best)
        if better:
            self.state.best_metric = value
            self.state.best_global_step = self.state.global_step

        return better

    # ---- Weights and checkpoints ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as Trainer does, for `from_pretrained`; all workers call it."""
        folder = Path(output_dir or self.args.output_dir)
        built = self._built()
        first = self.is_world_process_zero()
        if first:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder if first else None) as place:
            path = Path(place) / "weights.pt"
            built.save_weights(path)
            if first:
                self._save(str(folder), state_dict=torch.load(path, weights_only=True))

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the weights, the pipeline's state and the trainer's; all workers
        call it.
        """
        folder = Path(self.args.output_dir) / f"{CHECKPOINT}-{self.state.global_step}"
        self.save_model(str(folder))
        if not self.args.save_only_model:
            self._make_room_for(folder / PIPELINE)
            self._built().save_checkpoint(folder / PIPELINE, keep=1)
        if self.state.global_step == getattr(self.state, "best_global_step", None):
            self.state.best_model_checkpoint = str(folder)
        if self.is_world_process_zero():
            self.state.save_to_json(str(folder / STATE))
            write_generators(folder)
            remove_checkpoints(
                Path(self.args.output_dir),
                self.args.save_total_limit,
                self.state.best_model_checkpoint,
                written=folder,
            )

    def _make_room_for(self, folder: Path) -> None:
        """Remove a checkpoint of the same step, which a run left that was resumed from an earlier
        step: a Trainer writes over it, too. The pipeline replaces this run's own.
        """
        if folder.exists() and folder not in self._saved_to:
            shutil.rmtree(folder, ignore_errors=True)  # the workers of a host remove it together
        share("", control_group())  # nobody writes before all have looked
        self._saved_to.add(folder)


def _warn_of_staleness(plan: Plan) -> None:
    """Say on the first worker that an asynchronous schedule is another training."""
    if plan.schedule.asynchronous and os.environ.get("RANK", "0") == "0":
        _log.warning(
            "%s is asynchronous: gradients are up to %d updates stale, so losses differ from those "
            "of Trainer, and a log has the losses of earlier updates; "
            "hint: a plan under 1f1b-flush trains as Trainer does",
            plan.schedule,
            plan.staleness,
        )
