"""Which optimizers may step parts of a parameter by themselves: only those that treat each of its elements alone."""

from __future__ import annotations

from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from planner.model.spec import TrainingSpec

# What an element becomes depends on its own gradients and on numbers that all elements share. Not so in Adafactor,
# LAMB, Muon, Shampoo and L-BFGS, which look at rows, norms or products of whole parameters.
ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` treats each element of a parameter alone.

    An optimizer that is not PyTorch's says so itself, by an attribute `elementwise`, of its class or of the object that
    the model file's optimizer() returns. A subclass of one of PyTorch's may do anything, and says so, too.
    """
    said = getattr(optimizer, "elementwise", None)
    return type(optimizer) in ELEMENTWISE if said is None else bool(said)


def has_elementwise_optimizer(spec: TrainingSpec, model: nn.Module) -> bool | None:
    """Return whether the optimizer of `spec` for `model` is elementwise; None where nothing is trained."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return is_elementwise(spec.optimizer(trained)) if trained else None
