"""What export does not record, from one run of the graph on tensors without data.

Export traces under no_grad, so which values carry a gradient is not in the graph; and it does not say which
values share memory, without which an in-place operation could be cut from the value it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

# Their schemas do not say that they write these arguments: running mean and variance.
_WRITES_SILENTLY = {"aten::batch_norm": (3, 4), "aten::instance_norm": (3, 4)}


@dataclass(frozen=True)
class Observed:
    """By node: whether its value carries a gradient, the memory it lies in, and the memory it writes.

    `orders` gives the dimensions of a value that can be sent, from the outermost in memory to the innermost, and
    `expanded` those that hold one element for all.
    """

    requires_grad: Mapping[fx.Node, bool]
    dtypes: Mapping[fx.Node, torch.dtype]
    orders: Mapping[fx.Node, tuple[int, ...]]
    expanded: Mapping[fx.Node, tuple[int, ...]]
    storages: Mapping[fx.Node, frozenset[int]]
    writes: Mapping[fx.Node, frozenset[int]]


def observe(module: fx.GraphModule, leaves: list[Any]) -> Observed:
    """Run `module` on `leaves` (as `Batch.flatten` gives them) without data, weights or side effects.

    Its weights may be FakeTensors: of a model that is not there.
    """
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True) as mode:
        observer = _Observer(module, mode)
        fake = [_fake(leaf, mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            observer.run(*fake, enable_io_processing=False)
    return Observed(
        requires_grad=observer.requires_grad(),
        dtypes=observer.dtypes,
        orders=observer.orders,
        expanded=observer.expanded,
        storages=observer.storages,
        writes=observer.writes,
    )


class _Observer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        # Values are kept to the end: memory that is freed would be given to another value.
        super().__init__(module, garbage_collect_values=False)
        self._mode = mode
        self._attributes: dict[int, Tensor] = {}
        self.dtypes: dict[fx.Node, torch.dtype] = {}
        self.orders: dict[fx.Node, tuple[int, ...]] = {}
        self.expanded: dict[fx.Node, tuple[int, ...]] = {}
        self.storages: dict[fx.Node, frozenset[int]] = {}
        self.writes: dict[fx.Node, frozenset[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and not _is_wrapped(value) and not _depends_on_data(value):
            self.dtypes[n] = value.dtype
            self.orders[n] = memory_order(value)
            self.expanded[n] = tuple(d for d, size in enumerate(value.shape) if size > 1 and value.stride(d) == 0)
        self.storages[n] = _storages(value)
        self.writes[n] = _storages([self.env[node] for node in _written_nodes(n, self.module)])
        return value

    def requires_grad(self) -> dict[fx.Node, bool]:
        """As it is when all has run: an in-place operation can give a gradient to a value made before it."""
        return {
            node: any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
            for node, value in self.env.items()
        }

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        # Tied parameters must stay one tensor.
        return self._attributes.setdefault(id(value), _fake(value, self._mode))


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if not isinstance(tensor, FakeTensor):
        return mode.from_tensor(tensor, static_shapes=True)
    # Of another mode.
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return empty.requires_grad_(tensor.requires_grad)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost in memory to the innermost."""
    # Sizes of one have any stride, expanded dimensions none: where they stand does not matter, so they stay in place.
    strides: tuple[int, ...] = tuple(tensor.stride())
    moved = [d for d, size in enumerate(tensor.shape) if size > 1 and strides[d] > 0]
    outermost_first = iter(sorted(moved, key=lambda d: (-strides[d], d)))
    return tuple(next(outermost_first) if d in moved else d for d in range(tensor.dim()))


def _storages(value: Any) -> frozenset[int]:
    tensors = (_unwrapped(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return frozenset(int(tensor.untyped_storage()._cdata) for tensor in tensors)


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor exists inside torch.vmap or torch.func only."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _unwrapped(tensor: Tensor) -> Tensor:
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _depends_on_data(tensor: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _written_nodes(node: fx.Node, module: torch.nn.Module) -> Iterator[fx.Node]:
    if node.op != "call_function":
        return
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        graphs = [getattr(module, str(arg.target)) for arg in node.all_input_nodes if _is_graph(arg, module)]
        if any(next(_written_nodes(inner, graph), None) for graph in graphs for inner in graph.graph.nodes):
            yield from node.all_input_nodes
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    schema = node.target._schema
    silent = _WRITES_SILENTLY.get(schema.name, ())
    for index, argument in enumerate(schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes or index in silent:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, fx.Node))


def _is_graph(node: fx.Node, module: torch.nn.Module) -> bool:
    return node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), fx.GraphModule)
