"""From the flat graph's attributes back to the names of the user's model."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn

MODEL = "model"  # attribute of the wrapper that holds the user's model
_PREFIX = MODEL + "."


class Names:
    """Parameters and buffers by the name they first have in the model.

    Args:
        model: the user's.
        module: the flat graph of a wrapper around it.

    Attributes:
        tied: groups of names of one and the same parameter or buffer, the first one standing for all.
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
        """The name of the parameter that `node` reads, if it reads one."""
        return self._name(node, self._parameters)

    def buffer(self, node: fx.Node) -> str | None:
        """The name of the buffer that `node` reads, if it reads one."""
        return self._name(node, self._buffers)

    def constant(self, node: fx.Node) -> Any:
        """What a node reads that is neither: a tensor made in forward from numbers, or a nested graph."""
        assert node.op == "get_attr"
        return attrgetter(str(node.target))(self._module)

    def all(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of all parameters and of all buffers, each tensor once."""
        first = set(self._first.values())
        return tuple(n for n in self._parameters if n in first), tuple(n for n in self._buffers if n in first)

    def _name(self, node: fx.Node, tensors: dict[str, Any]) -> str | None:
        if node.op != "get_attr":
            return None
        name = str(node.target).removeprefix(_PREFIX)
        return self._first[name] if name in tensors and isinstance(tensors[name], Tensor) else None
