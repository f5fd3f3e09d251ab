"""Run models and graphs on tensors without data, among others to find what torch.export does not
record.

Export traces under no_grad and without autocast, so the graph does not tell which values need a
gradient, share memory, or have another dtype on another device.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from planner.errors import ModelFileError
from planner.formats.files import replace
from planner.model.batch import Batch
from planner.model.capture.cuda_autocast import cuda_autocast
from planner.model.capture.operations import enters_region, movable, moved, place_nested
from planner.model.capture.regions import entered
from planner.model.options import autocasting, bare_parameter_like
from planner.model.torch_private import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    tree_leaves,
    tree_map_only,
)
from planner.runtime import address_of, runtime_of

T = TypeVar("T")

CPU = torch.device("cpu")


def on_meta(build: Callable[[], T]) -> T:
    """Return what `build` returns, on the meta device, or in memory if it looks at the tensors'
    numbers.
    """
    try:
        with torch.device("meta"):
            return build()
    except ModelFileError:
        return build()  # a mistake in the file raises again


def fake_modules(
    modules: Sequence[nn.Module], mode: FakeTensorMode, device: torch.device = CPU
) -> tuple[nn.Module, ...]:
    """Return copies of the modules with fake weights on `device`; what they share stays shared."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    with mode:
        memo: dict[int, Any] = {id(tensor): _fake_weight(tensor, device) for tensor in tensors}
    return copy.deepcopy(tuple(modules), memo)


def make_fake(module: nn.Module, device: torch.device = CPU) -> None:
    """Replace the weights in `module` by fake ones of the active mode on `device`."""
    fakes: dict[int, Tensor] = {}
    for owner in module.modules():
        registries: list[dict[str, Any]] = [owner._parameters, owner._buffers]
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None:
                    registry[name] = fakes.setdefault(id(tensor), _fake_weight(tensor, device))


def fake_batch(batch: Batch, device: torch.device = CPU) -> Batch:
    """Return a batch of fake tensors of the active mode on `device`."""
    leaves = (batch.args, batch.kwargs, batch.target)
    return Batch(*tree_map_only(Tensor, lambda leaf: _without_data(leaf, device), leaves))


def _fake_weight(tensor: Tensor, device: torch.device) -> Tensor:
    empty = _without_data(tensor, device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    return bare_parameter_like(tensor, empty)


def _without_data(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def device_rules(kind: str) -> Iterator[torch.device]:
    """Let autocast follow the rules of a kind of device, and give the device that fake tensors are
    on while the context lasts.

    That is the CPU where PyTorch sees no CUDA device. Other kinds must be there. PyTorch asks for
    the number of a GPU, and for fake tensors it opens a context on theirs.
    """
    runtime = runtime_of(kind)
    if kind == "cuda" and not runtime.available():
        with cuda_autocast():
            yield CPU
    elif kind == "cpu":
        yield CPU
    else:
        yield torch.device(kind, runtime.current_index())


# Not all schemas of BatchNorm say that it writes these arguments.
_RUNNING = ("running_mean", "running_var")


@dataclass
class TensorFacts:
    """What the values of a graph are like, by node."""

    # those that another stage could receive
    values: dict[fx.Node, Tensor] = field(default_factory=dict)
    storages: dict[fx.Node, frozenset[int]] = field(default_factory=dict)  # that a value lies in
    writes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)  # that an operation writes

    def sharing_as(self, other: "TensorFacts") -> "TensorFacts":
        """Return these facts, with memory counted as shared or written also where it is so in
        `other`.
        """
        # Complements are negative: the numbers of one run stay apart from those of the other.
        storages = {
            node: own | {~each for each in other.storages[node]}
            for node, own in self.storages.items()
        }
        writes = {
            node: own | {~each for each in other.writes[node]} for node, own in self.writes.items()
        }
        return replace(self, storages=storages, writes=writes)


def fake_run(
    module: fx.GraphModule, leaves: list[Any], kind: str, autocast: torch.dtype | None
) -> TensorFacts:
    """Run `module` on `leaves` (as `Batch.flatten` gives them) without data, weights or side
    effects.

    The kind is "cpu", "cuda", which need not be there, or another that is there. Weights may be
    FakeTensors already.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with device_rules(kind) as device, mode:
        run = _FakeRun(module, mode, kind, device)
        fake = tree_map_only(Tensor, run.faked, leaves)
        with (
            torch.enable_grad(),
            torch.random.fork_rng(devices=[]),
            autocasting(device.type, autocast),
        ):
            run.run(*fake, enable_io_processing=False)

    return run.facts


class _FakeRun(fx.Interpreter):
    def __init__(
        self, module: fx.GraphModule, mode: FakeTensorMode, kind: str, device: torch.device
    ) -> None:
        # All values are kept to the end, because freed memory would be given to another value, and
        # look shared.
        super().__init__(module, garbage_collect_values=False)
        self._mode = mode
        self._kind = kind
        self._device = device
        self._attributes: dict[int, Any] = {}
        self.facts = TensorFacts()
        self._writes = _Writes()

    def faked(self, tensor: Tensor) -> Tensor:
        """Return a tensor like this one in this run's mode and on its device."""
        if not isinstance(tensor, FakeTensor) and tensor.device == self._device:
            return self._mode.from_tensor(tensor, static_shapes=True)
        # A FakeTensor of another mode cannot be converted, so an equal one is made in this mode.
        return _without_data(tensor, self._device).requires_grad_(tensor.requires_grad)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a function where the device's tensors are, and note what it writes."""
        args, kwargs = moved(target, args, kwargs, self._device, self._device.type)
        if isinstance(target, HigherOrderOperator) and not enters_region(target):
            # a branch or a loop, in which export permits no writes
            return super().call_function(target, args, kwargs)
        with self._writes:
            return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and note what it writes and of which storages its result is a view."""
        self._writes.storages.clear()
        with entered(n, self._kind, self._device.type):
            value = super().run_node(n)
        facts = self.facts
        if (
            isinstance(value, Tensor)
            and _unwrapped(value) is value
            # which would depend on data
            and not any(isinstance(size, torch.SymInt) for size in value.shape)
        ):
            facts.values[n] = value

        facts.storages[n] = _storages(value)
        # Of its arguments: what it wrote besides has been freed, and its number may be another
        # value's later.
        facts.writes[n] = (
            _storages([self.env[each] for each in n.all_input_nodes]) & self._writes.storages
        )
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a parameter, buffer or nested graph as it is on the device."""
        value = super().get_attr(target, args, kwargs)
        if id(value) not in self._attributes:  # tied parameters must stay one tensor
            placed = value
            if isinstance(value, fx.GraphModule):
                placed = movable(value)
                place_nested(placed, torch.empty((), device=self._device))
            elif isinstance(value, Tensor):
                placed = self.faked(value)
            self._attributes[id(value)] = placed

        return self._attributes[id(value)]


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that collects the storages that operations write in place, those of nested graphs
    included.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        declared = func._schema.arguments
        given = dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs
        for argument in declared:
            if (
                argument.alias_info is not None and argument.alias_info.is_write
            ) or argument.name in _RUNNING:
                self.storages |= _storages(given.get(argument.name))

        return func(*args, **kwargs)


def _storages(value: Any) -> frozenset[int]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return frozenset(address_of(_unwrapped(tensor)) for tensor in tensors)


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor within one that exists inside torch.vmap or torch.func only; itself if it
    is none.
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
