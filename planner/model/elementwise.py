"""Which optimizers may step a part of the parameters: a part of each one's elements, or some
parameters whole.
"""

from typing import Any

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

# What an element becomes depends on its own gradients and on numbers that all elements share. Not
# so in Adafactor, LAMB, Muon, Shampoo and L-BFGS, which look at rows, norms or products of whole
# parameters.
ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` treats each element of a parameter alone, as PyTorch's do or
    `elementwise` says.
    """
    said = getattr(optimizer, "elementwise", None)
    if said is None:
        return type(optimizer) in ELEMENTWISE
    return bool(said)


def kept_whole(optimizer: Optimizer) -> list[nn.Parameter] | None:
    """Return the parameters that `optimizer` must see whole, as its `whole_parameters()` says; []
    if it is elementwise.

    None where nobody says that parts of the parameters may be updated by themselves.
    """
    said: Any = getattr(optimizer, "whole_parameters", None)
    if said is not None:
        return list(said())
    if is_elementwise(optimizer):
        return []
    return None


def has_divisible_optimizer(spec: TrainingSpec, model: nn.Module) -> bool | None:
    """Return whether replicas may divide the optimizer of `spec` for `model`; None where nothing is
    trained.
    """
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if not trained:
        return None
    return kept_whole(spec.optimizer(trained)) is not None
