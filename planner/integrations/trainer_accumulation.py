"""Whether a Trainer that accumulates batches trains what a pipeline does.

A pipeline weighs the mean losses of its microbatches by the labels that they count. A Trainer does
so where the model divides its loss by `num_items_in_batch`, the labels of all accumulated batches.
It takes a forward with keyword arguments for such a model, and many of these ignore the number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from planner.errors import InputError
from planner.integrations.trainer_spec import LOSS, example_of
from planner.model.randomness import generators_kept


def check_accumulation(trainer: Trainer) -> None:
    """Raise InputError where Trainer would weigh the batches of an update otherwise."""
    args = trainer.args
    batches = args.gradient_accumulation_steps
    if batches == 1 or trainer.train_dataset is None:
        return

    difference = _difference(trainer)
    if difference is not None:
        raise InputError(
            difference,
            hint=f"give per_device_train_batch_size={args.per_device_train_batch_size * batches} "
            f"and gradient_accumulation_steps=1: the pipeline splits the batch itself",
        )


def _difference(trainer: Trainer) -> str | None:
    """Return how Trainer weighs accumulated batches, in a sentence; None for as a pipeline does."""
    # which releases of transformers have that lets a subclass decide
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is not None:
        return (
            f"PipelineTrainer does not follow loss_is_scaled_for_ga={scaled} of "
            f"{type(trainer).__name__}: a pipeline weighs accumulated batches by their labels"
        )

    model = type(trainer.model).__name__
    if not trainer.model_accepts_loss_kwargs:
        return (
            f"the forward of {model} takes no num_items_in_batch, so Trainer would average the "
            f"losses of accumulated batches, whatever they count, and a pipeline weighs them"
        )

    example = example_of(trainer)
    if "labels" not in example:
        return (
            f"batches have {', '.join(example)} and no 'labels' that Trainer counts, so it would "
            f"average the losses of accumulated batches, and a pipeline weighs them"
        )

    items = example["labels"].numel()
    try:
        loss, of_twice = (_loss(trainer, example, count) for count in (items, 2 * items))
    except Exception as error:
        return (
            f"the forward of {model} fails on {_device_of(trainer)} with "
            f"{type(error).__name__}, so it is unknown whether it divides its loss by "
            f"num_items_in_batch, as a pipeline does"
        )

    # A quotient by twice as much is half of it, but for the loss's own rounding.
    close = 4 * torch.finfo(loss.dtype).eps
    if math.isclose(float(loss), 2 * float(of_twice), rel_tol=close):
        return None
    return (
        f"the loss of {model} is {float(loss):.4g} with num_items_in_batch={items} and "
        f"{float(of_twice):.4g} with {2 * items}, not half of it, so Trainer would add up losses "
        f"of accumulated batches, and a pipeline averages them"
    )


def _loss(trainer: Trainer, example: dict[str, Tensor], items: int) -> Tensor:
    """Return the model's loss on a batch, of an update with so many labels."""
    model: Any = trainer.model
    device = _device_of(trainer)
    inputs = {name: value.to(device) for name, value in example.items()}
    training = model.training
    model.eval()  # the same without dropout
    try:
        with torch.no_grad(), generators_kept(device):
            loss: Tensor = model(**inputs, num_items_in_batch=torch.tensor(items, device=device))[
                LOSS
            ]
    finally:
        model.train(training)

    return loss.cpu()


def _device_of(trainer: Trainer) -> torch.device:
    first = next(trainer.model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
