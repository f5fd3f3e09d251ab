"""Collect a stage's part of the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from planner.model.capture.graph import GraphLayer, LayerGraph


def weights_of(graph: LayerGraph, layers: Sequence[GraphLayer]) -> nn.Module:
    """Return a tree of bare modules that hold the layers' parameters and buffers, named and ordered as in the model."""
    root = nn.Module()
    add_missing(root, graph, [name for layer in layers for name in (*layer.parameters, *layer.buffers)])
    return root


def add_missing(root: nn.Module, graph: LayerGraph, names: Sequence[str]) -> None:
    """Add the model's parameters and buffers called `names` to the tree at `root`, each under all its names."""
    present = {
        name
        for name, _ in (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    }
    wanted = set(graph.names_of(sorted(set(names)))) - present
    for name, parameter in graph.model.named_parameters(remove_duplicate=False):
        if name in wanted:
            holder, last = _holder(root, name)
            holder.register_parameter(last, parameter)
    for name, buffer in graph.model.named_buffers(remove_duplicate=False):
        if name in wanted:
            holder, last = _holder(root, name)
            holder.register_buffer(last, buffer, persistent=_is_persistent(graph.model, name))


def _holder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return holder_of(root, path), last


def holder_of(root: nn.Module, path: str) -> nn.Module:
    """Return the bare module at `path` below `root`; make it if it is missing."""
    holder = root
    for part in path.split(".") if path else []:
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        child = holder._modules[part]
        assert child is not None
        holder = child
    return holder


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last not in model.get_submodule(path)._non_persistent_buffers_set
