"""How a model's modules are divided over ranks, by patterns of their names.

A model file says so by `tensor_parallel_plan()`, models of transformers by their `tp_plan`, as in
`{"model.layers.*.mlp.up_proj": "colwise"}`. A "colwise" product has a part of the outputs on each rank, and its ranks
sum up the gradients of its input; a "rowwise" one has a part of the inputs, and they sum up its outputs, as do those of
an embedding, each with a part of the vocabulary (Shoeybi et al., "Megatron-LM", 2019, section 3). What gathers its
output, and what is not named, is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from planner.model.spec import TrainingSpec

Plan = Mapping[str, str]  # how modules are divided, by patterns of their names
COLUMNS, ROWS = ("colwise", "packed_colwise"), ("rowwise", "embedding_rowwise")


def declared_plan(training_spec: TrainingSpec, model: nn.Module) -> Plan | None:
    """Return how the model's modules are divided; None if neither the model file nor the model says so."""
    if training_spec.defines("tensor_parallel_plan"):
        return training_spec.tensor_parallel_plan()
    for name, module in model.named_modules():
        if plan := getattr(module, "tp_plan", None):
            return {f"{name}.{pattern}" if name else pattern: style for pattern, style in plan.items()}
    return None


def style_of(plan: Plan, name: str) -> str | None:
    """Return how a module is divided; a star in a pattern stands for a number."""
    general = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    return plan.get(name, plan.get(general))
