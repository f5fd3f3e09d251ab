"""Collect a stage's part of the model's parameters and buffers, and lay out those of recurrent layers.

cuDNN needs the weights of a recurrent layer in one piece of memory. Otherwise it copies all of them together in every
forward, and warns. PyTorch's own modules see to it when they are moved to a GPU. A stage calls the operation without
the module. What moves it, and what makes another version of its weights, lays them out again: once per version, for
versions are recycled. Under autocast cuDNN's operation casts the weights in every forward and lays out the copies
itself, as it does for PyTorch's own modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.backends import cudnn
from torch.backends.cudnn import rnn

from planner.model.capture.graph import GraphLayer, LayerGraph
from planner.runtime import runtime_of

_MODES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN_TANH", "rnn_relu": "RNN_RELU"}  # operation: cuDNN's name
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_WEIGHTS, _LAYERS, _BIDIRECTIONAL, _BATCH_FIRST = 2, 4, 7, 8  # positions of arguments of aten.lstm.input


@dataclass(frozen=True)
class RecurrentWeights:
    """The weights of one recurrent layer."""

    names: tuple[str, ...]  # of the parameters, in the operation's order
    mode: str  # cuDNN's name of the kind of layer
    layers: int  # how many are stacked
    bidirectional: bool  # whether each runs both ways
    batch_first: bool  # whether the first dimension of its input is the batch

    def join(self, weights: Sequence[Tensor]) -> None:
        """Move `weights`, those called `names`, into one piece of memory, if cuDNN will run the layer."""
        first = weights[0]
        if any(weight.dtype != first.dtype or not cudnn.is_acceptable(weight) for weight in weights):  # type: ignore[no-untyped-call]
            return
        if len({weight.data_ptr() for weight in weights}) < len(weights):
            return  # weights that are one and the same cannot lie side by side
        of_each = len(weights) // (self.layers * (1 + self.bidirectional))
        projected = of_each % 2  # after two products and their biases, LSTM's projection
        hidden = first.shape[0] // _GATES[self.mode]
        with torch.no_grad(), runtime_of(first.device).current(first.device):
            torch._cudnn_rnn_flatten_weight(
                list(weights),
                of_each,
                first.shape[1],
                rnn.get_cudnn_mode(self.mode),  # type: ignore[no-untyped-call]
                hidden,
                weights[of_each - 1].shape[0] if projected else 0,
                self.layers,
                self.batch_first,
                self.bidirectional,
            )


def recurrent_weights(graph: LayerGraph, layers: Sequence[GraphLayer]) -> tuple[RecurrentWeights, ...]:
    """Return the weights of each recurrent layer among `layers`, those of a layer that is called twice once.

    Weights that are computed, as DropConnect's are, are none that could be laid out.
    """
    if graph.blocks is None:
        found = _of_operations(graph, layers)
    else:
        first, last = (graph.position[layer.name] for layer in (layers[0], layers[-1]))
        blocks = [block for layer in graph.blocks.layers[first : last + 1] for _, block in layer.blocks]
        found = _of_modules(graph.model, {module for block in blocks for module in block.modules()})
    apart: list[RecurrentWeights] = []
    for weights in found:
        if not any(set(weights.names) & set(other.names) for other in apart):
            apart.append(weights)
    return tuple(apart)


def _of_operations(graph: LayerGraph, layers: Sequence[GraphLayer]) -> Iterator[RecurrentWeights]:
    for node in (node for layer in layers for node in layer.nodes):
        # Packed sequences, whose operations are the overloads `data`, cannot be captured.
        if isinstance(node.target, torch._ops.OpOverload) and node.target._overloadname == "input":
            mode = _MODES.get(node.target.overloadpacket.__name__)
            nodes: Any = node.args[_WEIGHTS] if mode is not None else ()
            names = [graph.names.parameter(each) for each in nodes if isinstance(each, fx.Node)]
            known = tuple(name for name in names if name is not None)
            if mode is not None and len(known) == len(nodes):
                count, both, batch_first = (node.args[i] for i in (_LAYERS, _BIDIRECTIONAL, _BATCH_FIRST))
                assert isinstance(count, int)
                yield RecurrentWeights(known, mode, count, bool(both), bool(batch_first))


def _of_modules(model: nn.Module, inside: set[nn.Module]) -> Iterator[RecurrentWeights]:
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module in inside:
            names = tuple(f"{path}.{name}" if path else name for name in module._flat_weights_names)
            both = bool(module.bidirectional)
            yield RecurrentWeights(names, module.mode, module.num_layers, both, module.batch_first)


def weights_of(graph: LayerGraph, layers: Sequence[GraphLayer]) -> nn.Module:
    """Return a tree of bare modules that hold the layers' parameters and buffers, named and ordered as in the model."""
    root = nn.Module()
    add_missing(root, graph, [name for layer in layers for name in (*layer.parameters, *layer.buffers)])
    return root


def add_missing(root: nn.Module, graph: LayerGraph, names: Sequence[str]) -> None:
    """Add the model's parameters and buffers called `names` to the tree at `root`, each under all its names."""
    present = {*dict(root.named_parameters(remove_duplicate=False)), *dict(root.named_buffers(remove_duplicate=False))}
    wanted = set(graph.names_of(sorted(set(names)))) - present
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


def holder_of(root: nn.Module, path: str) -> nn.Module:
    """Return the bare module at `path` below `root`; make it if it is missing."""
    holder = root
    for part in path.split(".") if path else []:
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    return holder
