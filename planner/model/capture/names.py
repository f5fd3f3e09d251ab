"""Names in the user's model of the weights that a flat graph reads, and of the modules that ran its operations."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn

MODEL = "model"  # attribute of the exported wrapper that holds the user's model
_PREFIX = MODEL + "."


class Names:
    """Parameters and buffers by the first name that each has in the model.

    Args:
        module: the flat graph of a wrapper around it.

    Attributes:
        tied: groups of names of one and the same parameter or buffer; the first one stands for all.
    """

    def __init__(self, model: nn.Module, module: fx.GraphModule) -> None:
        self._module = module
        self._first: dict[str, str] = {}
        groups: dict[int, list[str]] = {}
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        for name, tensor in (self._parameters | self._buffers).items():
            group = groups.setdefault(id(tensor), [])
            group.append(name)
            self._first[name] = group[0]
        self.tied = tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def parameter(self, node: fx.Node) -> str | None:
        """Return the name of the parameter that `node` reads; None if it reads none."""
        return self._name(node, self._parameters)

    def buffer(self, node: fx.Node) -> str | None:
        """Return the name of the buffer that `node` reads; None if it reads none."""
        return self._name(node, self._buffers)

    def constant(self, node: fx.Node) -> Any:
        """Return what a `get_attr` node reads besides weights: a tensor made in forward, or a nested graph."""
        assert node.op == "get_attr"
        return attrgetter(str(node.target))(self._module)

    def all(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of all parameters and of all buffers, each tensor once."""
        first = set(self._first.values())
        return tuple(n for n in self._parameters if n in first), tuple(n for n in self._buffers if n in first)

    def _name(self, node: fx.Node, tensors: dict[str, Any]) -> str | None:
        if node.op != "get_attr":
            return None
        name = str(node.target).removeprefix(_PREFIX)
        return self._first[name] if name in tensors and isinstance(tensors[name], Tensor) else None


def nested_graph(node: fx.Node, module: nn.Module) -> fx.GraphModule | None:
    """Return the graph within the flat graph `module`, of a no_grad region for instance, that `node` reads."""
    graph = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return graph if isinstance(graph, fx.GraphModule) else None


def scope_of(node: fx.Node) -> str | None:
    """Return the path of the innermost module that ran `node`, "" for the model; None for the loss function."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    inside = [path for path in paths if path == MODEL or path.startswith(_PREFIX)]
    # The tracer numbers the calls of a module that is called more than once: "block@1".
    return inside[-1].removeprefix(MODEL).removeprefix(".").split("@")[0] if inside else None
