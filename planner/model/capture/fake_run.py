"""Find what torch.export does not record, by a run of the graph on tensors without data.

Export traces under no_grad, so the graph does not tell which values need a gradient. Nor does it tell which values
share memory, without which a cut could separate an in-place operation from the value that it changes. And it was traced
without autocast, whose rules differ between devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.model.capture.fake import fake_device, pretended
from planner.model.capture.graph import expanded_dimensions, memory_order
from planner.model.capture.operations import enters_region, movable, moved, place_nested
from planner.model.options import autocasting

# Not all schemas of BatchNorm say that it writes these arguments.
_RUNNING = ("running_mean", "running_var")


@dataclass
class TensorFacts:
    """What the values of a graph are like, by node.

    Attributes:
        requires_grad: whether the value needs a gradient.
        dtypes: element type; like `orders` and `expanded`, only of values that another stage could receive.
        orders: dimensions from the outermost in memory to the innermost.
        expanded: dimensions along which the memory holds one element for all.
        storages: the memory that the value lies in.
        writes: the memory that the operation writes in place.
    """

    requires_grad: Mapping[fx.Node, bool] = field(default_factory=dict)
    dtypes: dict[fx.Node, torch.dtype] = field(default_factory=dict)
    orders: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    expanded: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    storages: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    writes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)

    def sharing_as(self, other: TensorFacts) -> TensorFacts:
        """Return these facts, with memory counted as shared or written also where it is so in `other`."""

        def joined(mine: dict[fx.Node, frozenset[int]], others: dict[fx.Node, frozenset[int]]) -> Any:
            # Complements are negative: the numbers of one run stay apart from those of the other.
            return {node: mine[node] | {~storage for storage in others[node]} for node in mine}

        storages, writes = joined(self.storages, other.storages), joined(self.writes, other.writes)
        return replace(self, storages=storages, writes=writes)


def fake_run(module: fx.GraphModule, leaves: list[Any], kind: str, autocast: torch.dtype | None) -> TensorFacts:
    """Run `module` on `leaves` (as `Batch.flatten` gives them) without data, weights or side effects.

    Args:
        module: its weights may be FakeTensors already, those of a model that is never built.
        leaves: on any device.
        kind: of the device to run on, "cpu" or "cuda", which need not be there.
        autocast: the dtype to run under torch.autocast with; None for none.
    """
    device = fake_device(kind)
    with (
        pretended(kind),
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True) as mode,
    ):
        run = _FakeRun(module, mode, device)
        fake = [_fake(leaf, mode, device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), autocasting(kind, autocast):
            run.run(*fake, enable_io_processing=False)
    # Read at the end: an in-place operation can make a value made before it need a gradient.
    run.facts.requires_grad = {
        node: any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
        for node, value in run.env.items()
    }
    return run.facts


class _FakeRun(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode, device: torch.device) -> None:
        # All values are kept to the end, because freed memory would be given to another value, and look shared.
        super().__init__(module, garbage_collect_values=False)
        self._mode, self._device = mode, device
        self._attributes: dict[int, Any] = {}
        self.facts = TensorFacts()
        self._writes = _Writes()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = moved(target, args, kwargs, self._device, self._device.type)
        if isinstance(target, torch._ops.HigherOrderOperator) and not enters_region(target):
            return super().call_function(target, args, kwargs)  # a branch or a loop, in which export permits no writes
        with self._writes:
            return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self._writes.storages.clear()
        value = super().run_node(n)
        facts = self.facts
        if isinstance(value, Tensor) and not _is_wrapped(value) and not _depends_on_data(value):
            facts.dtypes[n] = value.dtype
            facts.orders[n] = memory_order(value)
            facts.expanded[n] = expanded_dimensions(value)
        facts.storages[n] = _storages(value)
        # Of its arguments: what it wrote besides has been freed, and its number may be another value's later.
        facts.writes[n] = _storages([self.env[each] for each in n.all_input_nodes]) & self._writes.storages
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if id(value) not in self._attributes:  # tied parameters must stay one tensor
            self._attributes[id(value)] = self._placed(value)
        return self._attributes[id(value)]

    def _placed(self, value: Any) -> Any:
        if isinstance(value, fx.GraphModule):
            nested = movable(value)
            place_nested(nested, torch.empty((), device=self._device))
            return nested
        return _fake(value, self._mode, self._device) if isinstance(value, Tensor) else value


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that collects the storages that operations write in place, those of nested graphs included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        declared = func._schema.arguments
        named = ((each, kwargs.get(each.name)) for each in declared[len(args) :])
        for argument, value in chain(zip(declared, args, strict=False), named):
            if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in _RUNNING:
                self.storages |= _storages(value)
        return func(*args, **kwargs)


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    if not isinstance(tensor, FakeTensor) and tensor.device == device:
        return mode.from_tensor(tensor, static_shapes=True)
    # A FakeTensor of another mode cannot be converted, so an equal one is made in this mode.
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return empty.requires_grad_(tensor.requires_grad)


def _storages(value: Any) -> frozenset[int]:
    tensors = (_unwrapped(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return frozenset(int(tensor.untyped_storage()._cdata) for tensor in tensors)


def _is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor exists inside torch.vmap or torch.func only."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _unwrapped(tensor: Tensor) -> Tensor:
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _depends_on_data(tensor: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)
