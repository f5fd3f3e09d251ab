"""Hash a captured graph, so that a plan is only run on the model that it was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from planner.model.capture.size import is_symbolic

if TYPE_CHECKING:
    from planner.model.capture.graph import LayerGraph, ValueSpec


def graph_digest(graph: LayerGraph, specs: Mapping[fx.Node, ValueSpec]) -> str:
    """Return the SHA-256 of operations, arguments, shapes, dtypes, parameter names and layers.

    It does not depend on the process, the device or, unless the model pins it, the batch size.

    Args:
        graph: captured for any device.
    """
    sha = hashlib.sha256()
    for line in _lines(graph, specs):
        sha.update(line.encode() + b"\n")
    return sha.hexdigest()


def _lines(graph: LayerGraph, specs: Mapping[fx.Node, ValueSpec]) -> list[str]:
    lines = [
        f"parameter {name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        for name, parameter in graph.model.named_parameters(remove_duplicate=False)
    ]
    lines += [
        f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"
        for name, buffer in graph.model.named_buffers(remove_duplicate=False)
    ]
    lines += [f"tied {group}" for group in graph.tied_parameters]
    # Added when they are set only, so that the hashes of graphs without them stay as they were.
    lines += [f"autocast {graph.options.autocast}"] if graph.options.autocast is not None else []
    lines += ["channels-last"] if graph.options.channels_last else []
    lines += [f"layer {layer.name} {[node.name for node in layer.nodes]}" for layer in graph.layers]
    for node in graph.module.graph.nodes:
        spec = specs.get(node)
        value = f" {spec.dtype} {spec.requires_grad} {[str(size) for size in spec.sizes]} {spec.order}" if spec else ""
        value += f" {spec.expanded}" if spec and spec.expanded else ""
        lines.append(f"{node.op} {node.name} {_target(graph, node)} {_arguments(graph, node)}{value}")
    return lines


def _target(graph: LayerGraph, node: fx.Node) -> str:
    if node.op != "get_attr":
        return str(getattr(node.target, "__name__", "")) + ":" + _plain(node.target)
    name = graph.names.parameter(node) or graph.names.buffer(node)
    if name is not None:
        return name
    constant = graph.names.constant(node)
    if isinstance(constant, Tensor):
        return f"{constant.dtype} {constant.tolist()}"
    assert isinstance(constant, fx.GraphModule)
    return " ".join(f"{inner.op} {_plain(inner.target)} {_arguments(graph, inner)}" for inner in constant.graph.nodes)


def _plain(target: Any) -> str:
    # The default text of a function contains its address, which differs between processes.
    return str(target) if isinstance(target, (str, torch._ops.OpOverload)) else type(target).__name__


def _arguments(graph: LayerGraph, node: fx.Node) -> str:
    def text(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            value = leaf.meta.get("val")
            expression = graph.reader.expression(value) if is_symbolic(value) else None
            return f"%{leaf.name if expression is None else expression}"
        return "device" if isinstance(leaf, torch.device) else repr(leaf)

    is_leaf = lambda x: isinstance(x, fx.Node)  # noqa: E731
    return repr(tree_map(text, (node.args, dict(node.kwargs)), is_leaf=is_leaf))
