"""A stage's share of the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from planner.model.graph import GraphLayer, LayerGraph


def weights_of(graph: LayerGraph, layers: Sequence[GraphLayer]) -> nn.Module:
    """Bare modules that hold the layers' parameters and buffers under their names in the model, in its order."""
    used = {name for layer in layers for name in (*layer.parameters, *layer.buffers)}
    wanted = set(graph.names_of(sorted(used)))
    root = nn.Module()
    for name, parameter in graph.model.named_parameters(remove_duplicate=False):
        if name in wanted:
            holder, last = _holder(root, name)
            holder.register_parameter(last, parameter)
    for name, buffer in graph.model.named_buffers(remove_duplicate=False):
        if name in wanted:
            holder, last = _holder(root, name)
            holder.register_buffer(last, buffer, persistent=_is_persistent(graph.model, name))
    return root


def _holder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, last = name.split(".")
    holder = root
    for part in path:
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        child = holder._modules[part]
        assert child is not None
        holder = child
    return holder, last


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last not in model.get_submodule(path)._non_persistent_buffers_set
