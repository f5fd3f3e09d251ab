"""The operations of a captured graph: weights they read, modules that ran them, their random
numbers and device.

The tracer wrote the device that it ran on into the graph. That stays as it is, and so does its
hash: who runs its operations rewrites each with `moved`. `movable` makes copies of nested graphs,
of regions under no_grad or autocast and of branches, that hold a buffer: it goes where their stage
goes, and its device is the one that their operations need.
"""

import copy
import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.model.torch_private import HigherOrderOperator, OpOverload, tree_leaves, tree_map

MODEL = "model"  # attribute of the exported wrapper that holds the user's model
_PREFIX = MODEL + "."
_SLICE = re.compile(r"\.slice\(([^)]*)\)")
# one slice of another, and what of it
_SLICED = re.compile(r"(?P<slices>(?:\.slice\([^)]*\))+)(?:\.(?P<inner>\w+))?")

# An operation draws nothing where one of these arguments is zero, nor where it has an argument
# `train` that is false.
_SHARES = ("p", "dropout", "dropout_p")


class Names:
    """Parameters and buffers, read in a flat graph, by the first name that each has in the model.

    Attributes:
        tied: groups of names of one and the same parameter or buffer; the first one stands for all.
    """

    def __init__(self, model: nn.Module, module: fx.GraphModule) -> None:
        self._module = module
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = dict(model.named_buffers(remove_duplicate=False))

        groups: dict[int, list[str]] = {}
        for name, tensor in (self._parameters | self._buffers).items():
            groups.setdefault(id(tensor), []).append(name)

        self._first: dict[str, str] = {}
        for group in groups.values():
            self._first |= dict.fromkeys(group, group[0])
        self.tied = tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def parameter(self, node: fx.Node) -> str | None:
        """Return the name of the parameter that `node` reads; None if it reads none."""
        return self._name(node, self._parameters)

    def buffer(self, node: fx.Node) -> str | None:
        """Return the name of the buffer that `node` reads; None if it reads none."""
        return self._name(node, self._buffers)

    def constant(self, node: fx.Node) -> Any:
        """Return what a `get_attr` node reads besides weights: a tensor made in forward, or a
        nested graph.
        """
        assert node.op == "get_attr"
        return attrgetter(str(node.target))(self._module)

    def all(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of all parameters and of all buffers, each tensor once."""
        return tuple(
            tuple(n for n in named if self._first[n] == n)
            for named in (self._parameters, self._buffers)
        )

    def _name(self, node: fx.Node, tensors: dict[str, Any]) -> str | None:
        if node.op != "get_attr":
            return None
        name = str(node.target).removeprefix(_PREFIX)
        if name in tensors and isinstance(tensors[name], Tensor):
            return self._first[name]
        return None


def scope_of(node: fx.Node) -> str | None:
    """Return the path of the innermost module that ran `node`, "" for the model; None for the loss
    function.
    """
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    inside = [path for path in paths if path == MODEL or path.startswith(_PREFIX)]
    # The tracer numbers the calls of a module that is called more than once: "block@1".
    return inside[-1].removeprefix(MODEL).removeprefix(".").split("@")[0] if inside else None


def name_slices(module: fx.GraphModule, model: nn.Module) -> None:
    """Write into a traced graph which modules ran that the model took from a slice of a list, by
    their own paths.

    Where a module has several names, the tracer (read in PyTorch 2.13) calls those of `layers[1:3]`
    "layers.slice(1, 3, None).0" and so on.
    """
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack", {})
        if any(_SLICE.search(path) for path, _ in stack.values()):
            named = {
                key: (_without_slices(path, model), kind) for key, (path, kind) in stack.items()
            }
            node.meta["nn_module_stack"] = named


def _without_slices(path: str, model: nn.Module) -> str:
    """Return the path of a module as the model has it; that of a slice itself is the list's."""
    match = _SLICED.search(path)
    if match is None:
        return path
    holder = path[: match.start()]
    rest = path[match.end() :]
    container = model.get_submodule(holder.removeprefix(MODEL).removeprefix("."))
    names = [*container._modules]
    for bounds in _SLICE.findall(match["slices"]):
        names = names[
            slice(*(None if bound == "None" else int(bound) for bound in bounds.split(", ")))
        ]

    inner = match["inner"]
    if inner is None:
        return holder + _without_slices(rest, model)
    # A slice of a Sequential keeps the names; one of a ModuleList counts anew.
    name = inner
    if not isinstance(container, nn.Sequential):
        name = names[int(inner)]
    return _without_slices(f"{holder}.{name}{rest}", model)


# The tracer's checks of its assumptions pin a device or cost time. A stage checks its inputs
# itself.
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
_PLACE = "_place"  # name of the buffer
_AUTOCAST = "wrap_with_autocast"
_NO_GRAD = "wrap_with_set_grad_enabled"


def is_check(node: fx.Node) -> bool:
    """Return whether `node` checks an assumption of the tracer, and computes nothing."""
    if node.op == "call_function":
        return any(word in str(node.target) for word in _CHECKS)
    return node.op == "call_module"


def moved(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: Any, kind: Any
) -> tuple[Any, Any]:
    """Return the arguments of an operation on another device than the one it was traced on, and of
    another kind.
    """
    if enters_autocast(target):
        args = (kind, *args[1:])
    placed: tuple[Any, Any] = tree_map(
        lambda leaf: device if isinstance(leaf, torch.device) else leaf, (tuple(args), dict(kwargs))
    )
    return placed


def enters_autocast(target: Any) -> bool:
    """Return whether an operation runs a nested graph under torch.autocast."""
    return isinstance(target, HigherOrderOperator) and target.__name__ == _AUTOCAST


def enters_region(target: HigherOrderOperator) -> bool:
    """Return whether an operation runs its nested graph once as it is, under no_grad or
    autocast.
    """
    return target.__name__ in (_AUTOCAST, _NO_GRAD)


def movable(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a nested graph that runs on the device of its buffers, without the tracer's
    checks.
    """
    new = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    new.register_buffer(_PLACE, torch.zeros(()))
    new._non_persistent_buffers_set.update(new._buffers)  # no part of the model's state
    for name, child in list(new.named_children()):
        if isinstance(child, fx.GraphModule):
            new.add_module(name, movable(child))

    code = new.graph
    for node in reversed(list(code.nodes)):
        has_kind = enters_autocast(node.target)
        if is_check(node):
            code.erase_node(node)
        elif has_kind or any(
            isinstance(leaf, torch.device) for leaf in tree_leaves((node.args, dict(node.kwargs)))
        ):
            with code.inserting_before(node):
                device = code.call_function(getattr, (code.get_attr(_PLACE), "device"))
                kind = None
                if has_kind:
                    kind = code.call_function(getattr, (device, "type"))
            node.args, node.kwargs = moved(node.target, node.args, node.kwargs, device, kind)

    new.recompile()
    return new


def place_nested(graph: nn.Module, place: Tensor) -> None:
    """Let a movable graph, and those within it, run on the device of `place`."""
    for module in graph.modules():
        if _PLACE in module._buffers:
            module._buffers[_PLACE] = place


def is_random(node: fx.Node, module: nn.Module) -> bool:
    """Return whether an operation draws random numbers; dropout of probability 0 does not."""
    if isinstance(node.target, OpOverload):
        tags = node.target.tags
        return torch.Tag.nondeterministic_seeded in tags and not _draws_nothing(node, node.target)

    nested = _called(node, module)
    return any(is_random(inner, graph) for graph in nested for inner in graph.graph.nodes)


def writes(node: fx.Node, module: nn.Module) -> bool:
    """Return whether an operation writes into memory that was there before."""
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    nested = _called(node, module)
    return any(writes(inner, graph) for graph in nested for inner in graph.graph.nodes)


def _called(node: fx.Node, module: nn.Module) -> list[fx.GraphModule]:
    """Return what an operation calls with its values, as `cond` does."""
    attributes = [each for each in node.all_input_nodes if each.op == "get_attr"]
    read = [getattr(module, str(each.target), None) for each in attributes]
    return [graph for graph in read if isinstance(graph, fx.GraphModule)]


def _draws_nothing(node: fx.Node, operation: OpOverload) -> bool:
    """Return whether a call's arguments let it draw nothing: probability 0, or no training."""
    parameters = operation._schema.arguments
    arguments = {parameter.name: parameter.default_value for parameter in parameters}
    arguments |= dict(zip(arguments, node.args, strict=False)) | node.kwargs
    return any(arguments.get(name) == 0 for name in _SHARES) or arguments.get("train") is False
