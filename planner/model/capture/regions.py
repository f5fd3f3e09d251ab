"""Regions of a forward under torch.autocast, or with gradients switched off or on: cut as
everything else.

The tracer notes where a region begins and ends, and then puts its operations into a nested graph,
which one operation of the flat graph runs. So a model could not be cut within a region: a forward
that is decorated with autocast was a single layer. Of a region without gradients in one under
autocast the tracer even loses the inner one. So here its passes are replaced: operations stay in
the flat graph, each with the regions that it is in, and code that runs them enters these again.

Casts of weights that autocast remembers are those of one process as long as a region stays in one
piece of code: two uses of a weight in a region have one cast. A weight that is used on both sides
of a cut has copies on both anyway. Where a model says `cache_enabled=False`, gradients of weights
that are used twice in a region differ by rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from planner.runtime import known_kinds

_set_grad_pass = replace_set_grad_with_hop_pass.replace_set_grad_with_hop_pass
_autocast_pass = replace_autocast_with_hop_pass.replace_autocast_with_hop_pass

# What the tracer writes into a graph for torch.set_grad_enabled.
_set_grad_enabled = torch._C._set_grad_enabled

_META = "planner_regions"
_TRACED_ON = "cpu"


@dataclass(frozen=True, eq=False)
class Region:
    """A context manager that a part of the forward is in; two of the same kind are two objects."""

    grad: bool | None = None  # whether gradients are on; None for autocast
    device_type: str = ""  # of autocast
    dtype: torch.dtype | None = None
    enabled: bool = False

    def kind(self, device_type: str) -> str:
        """Return the kind of device of autocast where the model runs on one of `device_type`.

        The model may have asked its input, which was on the device that it was traced on.
        """
        if self.device_type == _TRACED_ON:
            return device_type
        return self.device_type

    def entered(self, device_type: str, runs_on: str) -> AbstractContextManager[Any]:
        """Return the context manager for a kind of device, for which another kind may stand."""
        if self.grad is not None:
            return torch.set_grad_enabled(self.grad)

        kind = self.kind(device_type)
        if kind == device_type:
            kind = runs_on
        return torch.autocast(kind, self.dtype, self.enabled)

    def __str__(self) -> str:
        if self.grad is not None:
            return f"gradients {self.grad}"
        return f"autocast {self.device_type} {self.dtype} {self.enabled}"


def regions_of(node: fx.Node) -> tuple[Region, ...]:
    """Return the regions that an operation is in, from the outermost to the innermost."""
    found: tuple[Region, ...] = node.meta.get(_META, ())
    return found


def entered(node: fx.Node, device_type: str, runs_on: str) -> ExitStack:
    """Enter the regions of an operation, for a run of it alone on `runs_on`, which stands for
    `device_type`.
    """
    stack = ExitStack()
    for region in regions_of(node):
        stack.enter_context(region.entered(device_type, runs_on))
    return stack


@contextmanager
def regions_noted() -> Iterator[None]:
    """Let the tracer note the regions of operations, in place of its own passes (read in PyTorch
    2.13).

    Graphs of branches and loops keep their regions as nested graphs: they are run as they are.
    """
    with (
        mock.patch.object(
            replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", _note_regions
        ),
        mock.patch.object(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", _leave),
    ):
        yield


def _leave(module: fx.GraphModule, signature: Any) -> tuple[fx.GraphModule, Any]:
    return module, signature


def _note_regions(module: fx.GraphModule, signature: Any) -> tuple[fx.GraphModule, Any]:
    """Give every operation of a flat graph its regions, and take out the nodes where they begin and
    end.
    """
    usual = torch.is_grad_enabled()
    gradients: Region | None = None
    autocast: dict[fx.Node, Region] = {}  # in the order that they were entered
    for node in list(module.graph.nodes):
        if node.target is _set_grad_enabled:
            gradients = None
            if node.args[0] != usual:
                gradients = Region(bool(node.args[0]))
        elif node.target is _enter_autocast:
            # The tracer remembers no casts, and says so in the last argument; one process does.
            device_type, dtype, enabled, _ = node.args
            autocast[node] = Region(None, str(device_type), dtype, bool(enabled))
        elif node.target is _exit_autocast:
            del autocast[node.args[0]]
        elif node.op == "call_function":
            # What autocast does is the same whether gradients are on, so theirs may be the
            # innermost region.
            node.meta[_META] = (*autocast.values(), *([gradients] if gradients is not None else []))
        elif node.op == "get_attr" and isinstance(
            nested := getattr(module, str(node.target), None), fx.GraphModule
        ):
            for replaced in (_set_grad_pass, _autocast_pass):
                nested, _ = replaced(nested, None)
            setattr(module, str(node.target), nested)

    for node in reversed(list(module.graph.nodes)):
        if node.target in (_set_grad_enabled, _enter_autocast, _exit_autocast):
            module.graph.erase_node(node)

    module.recompile()
    return module, signature


class RegionWriter:
    """Writes into the code of a stage where its operations enter and leave their regions."""

    def __init__(self, code: fx.Graph) -> None:
        self._code = code
        self._open: list[tuple[Region, fx.Node]] = []  # with what leaving it needs
        self.used = False

    def move_to(self, regions: Sequence[Region], device_type: fx.Node | None = None) -> None:
        """Be in these regions from here on: leave others, innermost first, and enter those that are
        missing.
        """
        same = 0
        while same < min(len(regions), len(self._open)) and regions[same] is self._open[same][0]:
            same += 1
        while len(self._open) > same:
            region, handle = self._open.pop()
            self._code.call_function(
                _exit_autocast if region.grad is None else _set_grad_enabled, (handle,)
            )

        for region in regions[same:]:
            self.used = True
            if region.grad is not None:
                handle = self._code.call_function(torch.is_grad_enabled)
                self._code.call_function(_set_grad_enabled, (region.grad,))
            else:
                kind = device_type if region.device_type == _TRACED_ON else region.device_type
                handle = self._code.call_function(
                    _enter_autocast, (kind, region.dtype, region.enabled)
                )
            self._open.append((region, handle))


@contextmanager
def restored_after_failure(device_type: str) -> Iterator[None]:
    """Restore what regions change where an operation within them fails, and so nothing
    leaves them.
    """
    # Devices that compute nothing, such as meta, follow the CPU's rules.
    if device_type not in known_kinds():
        device_type = "cpu"
    grad = torch.is_grad_enabled()
    cached = torch.is_autocast_cache_enabled()
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
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
