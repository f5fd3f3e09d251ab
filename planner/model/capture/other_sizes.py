"""Check that a captured graph is what the model computes on batches of another size, too.

The tracer sees one batch. It takes every size for two or more, and what the model does for a single
sample, such as `output.squeeze()` or a branch on `x.shape[0] == 1`, leaves no trace. So model and
graph run once more on tensors of the other size without data, and what they ask PyTorch for is
compared.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from planner.errors import PlannerError, reason_of
from planner.model.batch import Batch
from planner.model.capture.capture import values_unread
from planner.model.capture.failure import silent_tracer
from planner.model.capture.fake import fake_batch, fake_modules
from planner.model.capture.graph import LayerGraph
from planner.model.capture.operations import is_check
from planner.model.capture.pins import only_size
from planner.model.loss import loss_of
from planner.model.options import LossFunction
from planner.model.torch_private import FakeTensorMode, TorchDispatchMode, tree_leaves

# Sizes; None for one that depends on values, such as the number of a mask's true elements.
_Shape: TypeAlias = tuple[int | None, ...]
# An operation's name, and the shapes of what it makes.
_Operation: TypeAlias = tuple[str, tuple[_Shape, ...]]

# They compute nothing that others use, and the tracer leaves some of them out or adds some.
_SILENT = (
    "aten.detach",
    "aten.alias",
    "aten.lift",
    "aten.sym_",
    "aten._assert",
    "aten._local_scalar_dense",
    "prim.",
)
_SLICE = "aten.slice"  # which the tracer also writes where it takes everything, as in x[:, None]


class OtherSizes:
    """A model and its captured graph, without data, to be run on batches of other sizes than the
    captured one.

    The model is in the mode that it was captured in.
    """

    def __init__(self, graph: LayerGraph, loss: LossFunction | None, usual: Batch) -> None:
        self._loss = loss
        self._options = graph.options
        self._usual = usual
        self._only = None
        if graph.batch_size is not None:
            self._only = only_size(graph)
        self._blocks = graph.blocks is not None  # which run as they are, for any size
        self._problems: dict[int, str | None] = {usual.size: None}
        self._mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
        )
        self._model: nn.Module | None = None
        if self._only is None and not self._blocks:
            with suppress(Exception):  # whatever the copies of the user's modules raise
                (self._model,) = fake_modules([graph.model], self._mode)

        self._graph = _WithoutData(graph.module, self._mode)

    def problem(self, batch: Batch) -> str | None:
        """Return why the graph cannot stand for the model on batches of this size; None where it
        can.
        """
        if batch.size not in self._problems:
            self._problems[batch.size] = self._found(batch)
        return self._problems[batch.size]

    def _found(self, batch: Batch) -> str | None:
        if self._only is not None:
            return self._only
        if self._blocks:
            return None
        if self._model is None:
            return "the model cannot be copied, and so not be tried on it"
        problem = self._tried(batch)
        if problem is not None and self._tells:
            return problem
        return None

    @cached_property
    def _tells(self) -> bool:
        """Whether model and graph can be compared so: they agree where the graph is known to be
        right.

        A model may run another kernel without the tracer, one that takes no tensors without data.
        """
        return self._tried(self._usual) is None

    def _tried(self, batch: Batch) -> str | None:
        """Return how model and graph differ on a batch, or which of them fails."""
        try:
            of_model = self._operations(batch, self._run_model)
        except PlannerError as error:
            return error.message
        except Exception as cause:  # whatever the user's forward or loss raises
            return f"the model fails on it: {reason_of(cause)}"

        try:
            of_graph = self._operations(batch, self._run_graph)
        # whatever an operation raises on sizes that it was not captured for
        except Exception as cause:
            return f"the captured model fails on it: {reason_of(cause)}"

        return _difference(of_model, of_graph)

    def _operations(self, batch: Batch, run: Callable[[Batch], object]) -> list[_Operation]:
        batch = batch.distinct().prepared(self._options)
        with silent_tracer(), torch.random.fork_rng(devices=[]), torch.enable_grad(), self._mode:
            fake = fake_batch(batch)
            operations: list[_Operation] = []
            with _Recorder(operations):
                run(fake)
        return operations

    def _run_model(self, batch: Batch) -> Tensor:
        assert self._model is not None
        with values_unread():
            return loss_of(self._model(*batch.args, **batch.kwargs), batch.target, self._loss)

    def _run_graph(self, batch: Batch) -> object:
        return self._graph.run(*batch.flatten()[0], enable_io_processing=False)


class _WithoutData(fx.Interpreter):
    """Runs a copy of a graph on fake tensors, without the tracer's checks; it leads to no weight of
    the model.
    """

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        super().__init__(nn.Module(), graph=graph)
        self._attributes: dict[str, Any] = {}
        for node in graph.nodes:
            node.meta = {}
            if node.op == "get_attr":
                self._attributes[node.target] = _without_data(attrgetter(node.target)(module), mode)

    def run_node(self, n: fx.Node) -> Any:
        if is_check(n):
            return None
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._attributes[target]


def _without_data(value: Any, mode: FakeTensorMode) -> Any:
    """Return a fake tensor in place of a weight or constant; a nested graph, which has neither, as
    it is.
    """
    if not isinstance(value, Tensor):
        return value
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return fake.requires_grad_(value.requires_grad)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that notes the operations within."""

    def __init__(self, operations: list[_Operation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)  # scripts call other overloads for numbers
        takes_all = name == _SLICE and _shape(made) == _shape(args[0])
        if not (name.startswith(_SILENT) or takes_all):
            shapes = tuple(_shape(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
            self._operations.append((name, shapes))
        return made


def _shape(tensor: Tensor) -> _Shape:
    return tuple(
        size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
        for size in tensor.shape
    )


def _difference(of_model: Sequence[_Operation], of_graph: Sequence[_Operation]) -> str | None:
    """Return which operation the model has and the graph has not, or the other way round."""
    for modelled, captured in zip(of_model, of_graph, strict=False):
        if modelled != captured:
            return (
                f"the model computes something else on it than was captured: "
                f"{_text(modelled)}, not {_text(captured)}"
            )

    if len(of_model) != len(of_graph):
        return f"the model runs {len(of_model)} operations on it, and {len(of_graph)} were captured"
    return None


def _text(operation: _Operation) -> str:
    name, shapes = operation
    texts = [str(shape).replace("None", "?") for shape in shapes]
    return f"{name} of shape {', '.join(texts)}"
