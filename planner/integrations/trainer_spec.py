"""What a Trainer trains, for a pipeline: the model, its optimizer and scheduler, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, get_scheduler

from planner.errors import InputError
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec

Inputs = Mapping[str, Tensor]  # the model's arguments by name, the labels among them
PipelineBatch = tuple[tuple[()], dict[str, Tensor], None]  # as a pipeline's step takes it

LOSS = "loss"  # among the outputs of a model
BATCH_LOSS = "batch_loss"  # among the means of an evaluation, over samples as Trainer has it


@dataclass(frozen=True)
class Length:
    """How long a training is: an update of the Trainer is a minibatch of the pipeline."""

    batches_per_epoch: int
    updates_per_epoch: int
    updates: int
    epochs: int


def length_of(trainer: Trainer, loader: Any) -> Length:
    """Return how long `trainer` trains, as Trainer counts it: the last update of an epoch may have
    fewer batches.

    Raises:
        InputError: for a dataset without a length.
    """
    try:
        batches = len(loader)
    except TypeError:
        raise InputError(
            "the train_dataset has no length",
            hint="give a dataset with a length, or hand the stream to planner.pipeline in a loop "
            "of your own: docs/guides/own-loop.md",
        ) from None

    arguments = trainer.args
    per_epoch = max(1, -(-batches // arguments.gradient_accumulation_steps))
    updates = arguments.max_steps
    if updates <= 0:
        updates = -int(-arguments.num_train_epochs * per_epoch // 1)
    return Length(batches, per_epoch, updates, epochs=-(-updates // per_epoch))


def training_spec(
    trainer: Trainer, updates: int, on_output: Callable[[Any], None] | None = None
) -> TrainingSpec:
    """Return what the trainer trains in so many updates.

    Args:
        on_output: is told the model's output for each batch of an evaluation, on the workers of the
            last stage.
    """

    def optimizer(named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        return stage_optimizer(trainer, dict(named_parameters))

    def scheduler(optimizer: Optimizer) -> LRScheduler:
        return stage_scheduler(trainer, optimizer, updates)

    def metrics(output: Any, target: Any) -> dict[str, float]:
        if on_output is not None:
            on_output(output)
        return {BATCH_LOSS: float(output[LOSS])}

    example = example_of(trainer)
    trainer.model.train()  # as a Trainer's step does; from_pretrained leaves evaluation mode
    return TrainingSpec.from_objects(
        trainer.model,
        example_batch=pipeline_batch(example),
        optimizer=optimizer,
        scheduler=scheduler,
        metrics=metrics,
    )


def example_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return a batch of the trainer's samples, for which no generator is left changed.

    Raises:
        InputError: without a dataset.
    """
    if trainer.train_dataset is None:
        raise InputError(
            "a PipelineTrainer needs a train_dataset, which shows what batches are like",
            hint="give one, also to a trainer that only evaluates",
        )

    with generators_kept():
        return tensors_of(next(iter(trainer.get_test_dataloader(trainer.train_dataset))))


def stage_optimizer(trainer: Trainer, parameters: Mapping[str, Tensor]) -> Optimizer:
    """Return the optimizer that Trainer makes, for the parameters of one stage.

    Weight decay is for the same parameters as in the whole model: neither biases nor norms.
    """
    chosen = trainer.optimizer_cls_and_kwargs
    if chosen is None:
        chosen = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    kind, keywords = chosen
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or keywords.keys() & {
        "params",
        "model",
        "optimizer_dict",
    }:
        raise InputError(
            f"optim={trainer.args.optim} needs the whole model, and a stage has a part of it",
            hint="give an optimizer that is made of parameters, such as adamw_torch",
        )

    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    groups = []
    for decay, is_decayed in ((trainer.args.weight_decay, True), (0.0, False)):
        wanted = [
            parameter for name, parameter in parameters.items() if (name in decayed) == is_decayed
        ]
        groups.append({"params": wanted, "weight_decay": decay})

    return kind(groups, **keywords)


def stage_scheduler(trainer: Trainer, optimizer: Optimizer, updates: int) -> LRScheduler:
    """Return the scheduler that Trainer makes of its arguments."""
    scheduler: LRScheduler = get_scheduler(
        trainer.args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=trainer.args.get_warmup_steps(updates),
        num_training_steps=updates,
        scheduler_specific_kwargs=trainer.args.lr_scheduler_kwargs,
    )
    return scheduler


def pipeline_batch(inputs: Inputs) -> PipelineBatch:
    """Return the arguments of a model as a batch, whose loss the model computes."""
    return (), dict(inputs), None


def tensors_of(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a collator made, without what it left out; raise InputError for what is no
    tensor.
    """
    found = {}
    for name, value in batch.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise InputError(
                f"the data collator returns a {type(value).__name__} for '{name}', and a stage "
                f"sends tensors",
                hint="return tensors, whose first dimension is the samples",
            )
        found[name] = value

    return found


def minibatches(loader: Iterable[Any], batches: int) -> Iterator[dict[str, Tensor]]:
    """Yield what each update of a Trainer sees: the samples of `batches` batches, or fewer at the
    end.
    """
    iterator = iter(loader)
    while group := [tensors_of(batch) for batch in islice(iterator, batches)]:
        yield joined(group)


def joined(batches: Sequence[Inputs]) -> dict[str, Tensor]:
    """Return one batch of the samples of several.

    Raises:
        InputError: where they have other arguments, or other lengths.
    """
    first = batches[0]
    if len(batches) == 1:
        return dict(first)
    for other in batches[1:]:
        for name in sorted(first.keys() | other.keys()):
            shapes = [tuple(each[name].shape[1:]) for each in (first, other) if name in each]
            if len(shapes) < 2 or shapes[0] != shapes[1]:
                raise InputError(
                    f"the batches that one update accumulates differ in '{name}': "
                    f"{' and '.join(map(str, shapes))} per sample",
                    hint="pad all samples to one length: padding='max_length' of the tokenizer, or "
                    "pad_to_multiple_of of the collator; or give gradient_accumulation_steps=1",
                )

    return {name: torch.cat([batch[name] for batch in batches]) for name in first}
