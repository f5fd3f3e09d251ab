"""Collect a stage's part of the model's parameters and buffers, and lay out those of recurrent
layers.

cuDNN needs the weights of a recurrent layer in one piece of memory, or copies all of them in every
forward. PyTorch's modules see to it when they move, but a stage calls the operation: so what moves
it lays them out, each version anew.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from planner.model.capture.graph import GraphLayer, LayerGraph


class Place(NamedTuple):
    """Where code looks a weight up; modules replace the entries of their registries, but never a
    registry itself.
    """

    registry: dict[str, Tensor | None]
    name: str


def place_of(weights: nn.Module, name: str) -> Place:
    """Return where the tree at `weights` has a parameter or a buffer."""
    path, _, last = name.rpartition(".")
    holder = weights.get_submodule(path)
    registries: tuple[dict[str, Any], ...] = (holder._parameters, holder._buffers)
    return Place(next(each for each in registries if last in each), last)


def recurrent_modules(
    graph: LayerGraph, layers: Iterable[GraphLayer]
) -> list[tuple[nn.RNNBase, list[str]]]:
    """Return the recurrent modules whose weights are parameters of `layers`, none computed, with
    their names.
    """
    own = set(graph.names_of([name for layer in layers for name in layer.parameters]))
    modules = [each for each in graph.model.named_modules() if isinstance(each[1], nn.RNNBase)]
    named = [
        (module, [f"{path}.{name}".removeprefix(".") for name in module._flat_weights_names])
        for path, module in modules
    ]
    return [(module, names) for module, names in named if own.issuperset(names)]


def join_weights(module: nn.RNNBase, weights: Sequence[Tensor]) -> None:
    """Move `weights`, which stand for those of a recurrent module, into one piece of memory if
    cuDNN will use them.
    """
    own = module._flat_weights
    module._flat_weights = list(weights)
    try:
        module.flatten_parameters()
    finally:
        module._flat_weights = own


def weights_of(
    graph: LayerGraph, layers: Sequence[GraphLayer], root: nn.Module | None = None
) -> nn.Module:
    """Return a tree of bare modules with the layers' parameters and buffers, named and ordered as
    in the model.
    """
    root = root or nn.Module()
    present = {
        *dict(root.named_parameters(remove_duplicate=False)),
        *dict(root.named_buffers(remove_duplicate=False)),
    }
    names = {name for layer in layers for name in (*layer.parameters, *layer.buffers)}
    wanted = set(graph.names_of(sorted(names))) - present
    parameters = graph.model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *graph.model.named_buffers(remove_duplicate=False)):
        if name not in wanted:
            continue
        path, _, last = name.rpartition(".")
        holder = holder_of(root, path)
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(last, tensor)
        else:
            persistent = last not in graph.model.get_submodule(path)._non_persistent_buffers_set
            holder.register_buffer(last, tensor, persistent=persistent)

    return root


def use_registries(root: nn.Module, of: nn.Module) -> None:
    """Let the tree at `root` see every parameter that replaces one of the same name in that of
    `of`.
    """
    theirs = dict(of.named_modules(remove_duplicate=False))
    for path, module in root.named_modules(remove_duplicate=False):
        if path in theirs:
            module.__dict__["_parameters"] = theirs[path]._parameters


def holder_of(root: nn.Module, path: str) -> nn.Module:
    """Return the bare module at `path` below `root`; make it if it is missing."""
    holder = root
    for part in path.split(".") if path else []:
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    return holder
