"""Regions of a forward under torch.autocast, or with gradients switched off or on: cut as everything else.

The tracer puts the operations of a region into a nested graph, which one operation of the flat graph runs. So the model
could not be cut within a region, and a forward that is decorated with autocast was a single layer. Here the operations
come back into the flat graph, each with the regions that it is in, and code that runs them enters these again.

Casts of weights that autocast remembers are those of one process as long as a region stays in one piece of code: two
uses of a weight in a region have one cast. A weight that is used on both sides of a cut has copies on both anyway.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from planner.model.capture.operations import enters_autocast, enters_region
from planner.runtime import known_kinds

_META = "planner_regions"
_TRACED_ON = "cpu"


@dataclass(frozen=True, eq=False)
class Region:
    """A context manager that a part of the forward is in; two of the same kind are two objects."""

    grad: bool | None = None  # whether gradients are on; None for autocast
    device_type: str = ""  # of autocast
    dtype: torch.dtype | None = None
    enabled: bool = False
    cached: bool = True  # whether casts of weights are remembered

    def kind(self, device_type: str) -> str:
        """Return the kind of device of autocast where the model runs on one of `device_type`.

        The model may have asked its input, which was on the device that it was traced on.
        """
        return device_type if self.device_type == _TRACED_ON else self.device_type

    def entered(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context manager for a device."""
        if self.grad is not None:
            return torch.set_grad_enabled(self.grad)
        return torch.autocast(self.kind(device_type), self.dtype, self.enabled, self.cached)

    def __str__(self) -> str:
        if self.grad is not None:
            return f"gradients {self.grad}"
        return f"autocast {self.device_type} {self.dtype} {self.enabled} {self.cached}"


def regions_of(node: fx.Node) -> tuple[Region, ...]:
    """Return the regions that an operation is in, from the outermost to the innermost."""
    found: tuple[Region, ...] = node.meta.get(_META, ())
    return found


def entered(node: fx.Node, device_type: str) -> ExitStack:
    """Enter the regions of an operation, for a run of it alone."""
    stack = ExitStack()
    for region in regions_of(node):
        stack.enter_context(region.entered(device_type))
    return stack


def inline_regions(module: fx.GraphModule) -> None:
    """Replace, in a flat graph, each operation that runs a region by the region's own operations.

    The nodes that read nested graphs have no users then.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if _runs_region(node):
            region, nested, values = _parts(module, node)
            with graph.inserting_before(node):
                results = _copied(module, nested, values, (region,))
            _replace(node, results)


def _runs_region(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and enters_region(node.target)


def _parts(holder: nn.Module, node: fx.Node) -> tuple[Region, fx.GraphModule, list[Any]]:
    """Return the region that an operation runs, its graph, which `holder` has, and what that takes."""
    if enters_autocast(node.target):
        device_type, dtype, enabled, cached, nested, *values = node.args
        region = Region(None, str(device_type), dtype, bool(enabled), bool(cached))  # type: ignore[arg-type]
    else:
        grad, nested, *values = node.args
        region = Region(bool(grad))
    assert isinstance(nested, fx.Node)
    graph = attrgetter(str(nested.target))(holder)
    assert isinstance(graph, fx.GraphModule)
    return region, graph, values


def _copied(root: fx.GraphModule, nested: fx.GraphModule, values: Sequence[Any], regions: tuple[Region, ...]) -> Any:
    """Copy the operations of a nested graph to where the root's graph is written; return its results."""
    copies: dict[fx.Node, Any] = {}
    taken = iter(values)
    for node in nested.graph.nodes:
        source = node.args[0] if node.args else None
        results = copies.get(source) if isinstance(source, fx.Node) else None
        if node.op == "placeholder":
            copies[node] = next(taken)
        elif node.op == "output":
            return fx.map_arg(source, copies.__getitem__)
        elif _runs_region(node):
            region, inner, given = _parts(nested, node)
            copies[node] = _copied(root, inner, fx.map_arg(given, copies.__getitem__), (*regions, region))
        elif isinstance(results, (tuple, list)):  # of a region within
            copies[node] = results[node.args[1]]
        elif node.op == "get_attr":
            if not all(map(_runs_region, node.users)):
                copies[node] = root.graph.get_attr(_moved_attribute(root, nested, node))
        else:
            made = root.graph.node_copy(node, copies.__getitem__)
            made.meta[_META] = regions
            copies[node] = made
    raise AssertionError("a graph has an output")


def _moved_attribute(root: fx.GraphModule, holder: nn.Module, node: fx.Node) -> str:
    """Give the root what a nested graph reads besides its arguments; return its name there."""
    value = attrgetter(str(node.target))(holder)
    name = f"region_{str(node.target).replace('.', '_')}"
    number = 0
    while hasattr(root, name):
        number += 1
        name = f"{name}_{number}"
    if isinstance(value, nn.Module):
        root.add_module(name, value)
    else:
        root.register_buffer(name, value, persistent=False)
    return name


def _replace(node: fx.Node, results: Any) -> None:
    """Let the users of a region's operation, which take its results one by one, use the copies."""
    if not isinstance(results, (tuple, list)):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            user.graph.erase_node(user)
    node.graph.erase_node(node)


class RegionWriter:
    """Writes into the code of a stage where its operations enter and leave their regions."""

    def __init__(self, code: fx.Graph) -> None:
        self._code = code
        self._open: list[tuple[Region, fx.Node]] = []  # with what leaving it needs
        self.used = False

    def move_to(self, regions: Sequence[Region], device_type: fx.Node | None = None) -> None:
        """Be in these regions from here on: leave others, innermost first, and enter those that are missing."""
        same = 0
        while same < min(len(regions), len(self._open)) and regions[same] is self._open[same][0]:
            same += 1
        while len(self._open) > same:
            region, handle = self._open.pop()
            self._code.call_function(_exit_autocast if region.grad is None else torch._C._set_grad_enabled, (handle,))

        for region in regions[same:]:
            self.used = True
            if region.grad is not None:
                handle = self._code.call_function(torch.is_grad_enabled)
                self._code.call_function(torch._C._set_grad_enabled, (region.grad,))
            else:
                kind = device_type if region.device_type == _TRACED_ON else region.device_type
                handle = self._code.call_function(_enter_autocast, (kind, region.dtype, region.enabled, region.cached))
            self._open.append((region, handle))


@contextmanager
def restored_after_failure(device_type: str) -> Iterator[None]:
    """Restore what regions change where an operation within them fails, and so nothing leaves them."""
    # Devices that compute nothing, such as meta, follow the CPU's rules.
    device_type = device_type if device_type in known_kinds() else "cpu"
    grad, cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    depth = _depth()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
        while _depth() > depth:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        raise


def _depth() -> int:
    """Return how many contexts of autocast are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
