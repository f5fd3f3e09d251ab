"""Move a captured graph to the device that trains: the tracer wrote the device that it ran on into it.

    aten.arange.default(8, device=device(type='cpu'))           positions, masks
    aten.to.dtype_layout(x, ..., device=device(type='cpu'))     moves
    wrap_with_autocast('cpu', None, False, None, region, x)     rotary embeddings stay in float32 so

The exported graph stays as it is, and with it the graph's hash. Who runs its operations rewrites each with `moved`. The
graphs nested in it, of regions under no_grad or autocast and of branches, are called by operators that hand them
tensors, but no device. `movable` makes copies of them that hold a buffer: it goes where their stage goes, and its
device is the one that their operations need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

# The tracer's checks of its assumptions pin a device or cost time. A stage checks its inputs itself.
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
_PLACE = "_place"  # name of the buffer
_AUTOCAST = "wrap_with_autocast"


def is_check(node: fx.Node) -> bool:
    """Return whether `node` checks an assumption of the tracer, and computes nothing."""
    if node.op == "call_function":
        return any(word in str(node.target) for word in _CHECKS)
    return node.op == "call_module"


def moved(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: Any, kind: Any) -> tuple[Any, Any]:
    """Return the arguments of an operation on another device than the one it was traced on.

    Args:
        device: to put in place of any device among them.
        kind: of the device, to put in place of the one whose autocast a nested graph runs under.
    """
    if enters_autocast(target):
        args = (kind, *args[1:])
    placed: tuple[Any, Any] = tree_map(
        lambda leaf: device if isinstance(leaf, torch.device) else leaf, (tuple(args), dict(kwargs))
    )
    return placed


def enters_autocast(target: Any) -> bool:
    """Return whether an operation runs a nested graph under torch.autocast."""
    return isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ == _AUTOCAST


def movable(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a nested graph that runs on the device of its buffers, without the tracer's checks."""
    root = nn.Module()
    for name, child in graph.named_children():
        root.add_module(name, movable(child) if isinstance(child, fx.GraphModule) else child)
    for name, buffer in graph.named_buffers(recurse=False):
        root.register_buffer(name, buffer)
    root.register_buffer(_PLACE, torch.zeros(()))
    copy = fx.GraphModule(root, _movable_code(graph.graph))
    copy._non_persistent_buffers_set.update(copy._buffers)  # no part of the model's state
    return copy


def _movable_code(code: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.set_codegen(code._codegen)  # it says how arguments and results are nested
    copies: dict[fx.Node, fx.Node] = {}
    for node in code.nodes:
        if is_check(node):
            continue
        device = kind = None
        if enters_autocast(node.target) or _has_device(node):
            device = new.call_function(getattr, (new.get_attr(_PLACE), "device"))
        if enters_autocast(node.target):
            kind = new.call_function(getattr, (device, "type"))
        copy = copies[node] = new.node_copy(node, copies.__getitem__)
        copy.args, copy.kwargs = moved(copy.target, copy.args, copy.kwargs, device, kind)
    return new


def _has_device(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.device) for leaf in tree_leaves((node.args, dict(node.kwargs))))


def place_nested(graph: nn.Module, place: Tensor) -> None:
    """Let a movable graph, and those within it, run on the device of `place`."""
    for module in graph.modules():
        if _PLACE in module._buffers:
            module._buffers[_PLACE] = place
