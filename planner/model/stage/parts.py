"""What a stage is made of: how its code departs from the graph, what it exchanges with others, and
its segments.

A segment that recomputes keeps the values that enter it, and runs its forward again right before
its own backward (Chen et al. 2016, arXiv 1604.06174, section 3). The second forward reads the
buffers that the first one read, such as BatchNorm's statistics, and does not undo what later ones
wrote.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from planner.errors import CaptureError
from planner.formats.files import replace
from planner.model.capture.failure import FailuresPlaced
from planner.model.capture.graph import GraphLayer, LayerGraph
from planner.model.capture.size import BATCH, Size, is_symbolic, telling
from planner.model.randomness import RandomKey
from planner.model.stage.weights import Place
from planner.model.tensor.division import UNDIVIDED, DividedWeights


class LayerObserver(Protocol):
    """Protocol of what is told when each layer has run."""

    def after_layer(self, index: int, value: Tensor | None) -> None:
        """Layer `index` has run; `value` is the last of its results to need a gradient, whose
        backward runs first.
        """
        ...


@dataclass(frozen=True)
class Variant:
    """How a stage's code departs from the operations as captured."""

    # tell an observer of every layer: what is compiled or recomputes cannot
    observable: bool = False
    compiled: bool = False  # torch.compile makes one piece of code of the layers, or of each block
    recompute: tuple[tuple[str, ...], ...] = ()  # groups of layers, by name
    division: DividedWeights = UNDIVIDED  # the weights that a group of ranks divides
    # all layers, by name, where replicas divide the weights of each unit
    units: tuple[tuple[str, ...], ...] = ()
    # parts of the tokens, for each of which the head and the loss run by themselves
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        assert not (self.observable and (self.compiled or self.recompute or self.loss_chunks > 1))
        assert self.loss_chunks == 1 or not self.units


AS_CAPTURED = Variant()
OBSERVABLE = Variant(observable=True)
COMPILED = Variant(compiled=True)


@dataclass(frozen=True)
class Boundary:
    """The values that some layers of a graph exchange with the rest."""

    positions: tuple[int, ...]  # of the layers in the graph, ascending
    layers: tuple[GraphLayer, ...]
    used: tuple[fx.Node, ...]  # every node that they read
    inputs: tuple[tuple[int, fx.Node], ...]  # leaves of the batch, with their index there
    received: tuple[fx.Node, ...]  # from earlier stages
    sent: tuple[fx.Node, ...]  # to later stages, made here or received
    loss: fx.Node | None  # the node that makes it, if it is here

    @property
    def takes(self) -> tuple[fx.Node, ...]:
        """The values that the layers' code takes, besides numbers."""
        return (*(leaf for _, leaf in self.inputs), *self.received)

    @property
    def makes(self) -> tuple[fx.Node, ...]:
        """The values that the layers' code returns."""
        if self.loss is None:
            return self.sent
        return (*self.sent, self.loss)


def boundary_of(
    graph: LayerGraph,
    positions: Sequence[int],
    later: Set[int],
    keep: Sequence[str] = (),
) -> Boundary:
    """Return the boundary of the layers at some positions, ascending.

    Args:
        later: positions of the layers that run after these and take values from them.
        keep: names of further values made here that count as sent.
    """
    here = set(positions)
    layers = tuple(graph.layers[position] for position in positions)
    used = graph.read_by(layers)
    inputs = tuple((index, leaf) for index, leaf in enumerate(graph.inputs) if leaf in used)
    made = [node for layer in layers for node in layer.nodes]
    received = tuple(
        node for node in graph.crossing if node in used and graph.owner[node] not in here
    )

    sent = []
    for node in (*received, *made):
        has_users = node not in graph.fixed and not later.isdisjoint(graph.users(node))
        if has_users or node.name in keep:
            sent.append(node)

    return Boundary(
        positions=tuple(positions),
        layers=layers,
        used=used,
        inputs=inputs,
        received=received,
        sent=tuple(sent),
        loss=graph.loss if graph.loss in made else None,
    )


def stage_boundary(
    graph: LayerGraph, positions: Sequence[int], later: Set[int], keep: Sequence[str]
) -> Boundary:
    """Return the boundary of a stage: as `boundary_of`, but what it takes tells the size of the
    batch and its lengths.

    Layers that use no input may still depend on them, and run on some device.
    """
    boundary = boundary_of(graph, positions, later, keep)
    needed = _needed_symbols(graph, boundary)

    def told(inputs: Iterable[tuple[int, fx.Node]]) -> set[sympy.Symbol]:
        taken = (*(leaf for _, leaf in inputs), *boundary.received)
        return set(telling(_sizes(graph, taken)))

    inputs = boundary.inputs
    for leaf in enumerate(graph.inputs):
        if (needed - told(inputs)) & told((*inputs, leaf)):
            inputs = (*inputs, leaf)

    has_tensor = inputs or boundary.received or any(layer.parameters for layer in boundary.layers)
    if not has_tensor:  # which tells the device
        tensors = [(index, leaf) for index, leaf in enumerate(graph.inputs) if leaf in graph.specs]
        inputs = tuple(tensors[:1])

    return replace(boundary, inputs=inputs)


def _needed_symbols(graph: LayerGraph, boundary: Boundary) -> set[sympy.Symbol]:
    """Return the size of the batch, and the lengths in what a stage computes, takes and sends."""
    numbers = (node.meta.get("val") for node in boundary.used)
    expressions = (graph.reader.expression(number) for number in numbers if is_symbolic(number))
    sizes: Iterable[Any] = (*expressions, *_sizes(graph, (*boundary.takes, *boundary.sent)))
    return {BATCH}.union(*(size.free_symbols for size in sizes if isinstance(size, sympy.Basic)))


def _sizes(graph: LayerGraph, nodes: Iterable[fx.Node]) -> tuple[Size, ...]:
    """Return the sizes that values have, each once."""
    specs = (graph.specs[node] for node in nodes if node in graph.specs)
    return tuple(dict.fromkeys(size for spec in specs for size in spec.sizes))


@dataclass(frozen=True)
class Segment:
    """Layers of a stage, one after the other, that run as one piece of code."""

    run: Callable[..., tuple[Tensor, ...]]  # (device, key, observer, *taken) -> made
    # names of the values that it reads: the stage's own, or those that earlier segments make
    takes: tuple[str, ...]
    makes: tuple[str, ...]  # names of the values that `run` returns


def divided(
    graph: LayerGraph, boundary: Boundary, groups: Sequence[Sequence[str]]
) -> list[tuple[Boundary, bool]]:
    """Divide the layers of a stage into segments, given the groups that recompute; for each whether
    it recomputes.
    """
    runs = _runs(boundary, groups)
    if len(runs) == 1:
        (run,) = runs
        return [(boundary, run.recomputes)]

    kept = [node.name for node in boundary.sent]
    segments = []
    for run in runs:
        positions = boundary.positions[run.first : run.last + 1]
        later = set(boundary.positions[run.last + 1 :])
        segments.append((boundary_of(graph, positions, later, kept), run.recomputes))

    return segments


class _Run(NamedTuple):
    """Layers that follow one another, by their places in the stage."""

    first: int
    last: int
    recomputes: bool


def _runs(boundary: Boundary, groups: Sequence[Sequence[str]]) -> list[_Run]:
    """Return the groups that recompute and what lies between them, in order.

    The layers of a stage need not follow one another in the graph.
    """
    place_of = {layer.name: place for place, layer in enumerate(boundary.layers)}
    placed = sorted((sorted(place_of.get(name, -1) for name in names), names) for names in groups)
    runs = []
    start = 0
    for places, names in placed:
        first = places[0]
        last = places[-1]
        if first < start or places != list(range(first, last + 1)):
            raise CaptureError(
                f"the layers {list(names)}, which are to recompute together, do not follow one "
                f"another in their stage, or some are in two groups",
                hint="make the plan again with: plan solve",
            )
        runs += [_Run(start, first - 1, False), _Run(first, last, True)]
        start = last + 1

    runs.append(_Run(start, len(place_of) - 1, False))
    return [run for run in runs if run.first <= run.last]


def joined(segments: Sequence[Segment], takes: Sequence[str], results: Sequence[str]) -> Segment:
    """Return one segment that runs `segments` one after the other; it takes what the stage
    reads.
    """
    if len(segments) == 1:
        return segments[0]
    needed = set(results)
    steps: list[tuple[Segment, list[str]]] = []
    for segment in reversed(segments):
        # What only this segment still needs must not outlive it: activations would take memory
        # until the stage's end.
        steps.append((segment, [name for name in segment.takes if name not in needed]))
        needed.update(segment.takes)

    steps.reverse()

    def run(
        device: torch.device, key: RandomKey, observer: Any, *values: Any
    ) -> tuple[Tensor, ...]:
        known = dict(zip(takes, values, strict=True))
        for segment, last_used in steps:
            taken = [known[name] for name in segment.takes]
            for name in last_used:
                del known[name]
            known.update(
                zip(segment.makes, segment.run(device, key, observer, *taken), strict=True)
            )

        return tuple(known[name] for name in results)

    return Segment(run, tuple(takes), tuple(results))


def recomputing(segment: Segment, buffers: Sequence[Place], places: Mapping[str, str]) -> Segment:
    """Return a segment that keeps only what it takes, and runs again before its backward; it writes
    `buffers`.
    """

    def run(
        device: torch.device, key: RandomKey, observer: Any, *values: Any
    ) -> tuple[Tensor, ...]:
        # The stage's key will have been set for other units when the forward runs again.
        forward = partial(segment.run, device, key.copy(), observer)
        if not torch.is_grad_enabled():
            return forward(*values)
        before: Buffers = []  # of the first forward, once it runs
        has_run = False

        def forward_twice(*values: Any) -> tuple[Tensor, ...]:
            nonlocal before, has_run
            if not has_run:
                before = _copies(buffers)
                has_run = True
                return forward(*values)
            with _replaced(before), FailuresPlaced(places):
                return forward(*values)

        made: tuple[Tensor, ...] = checkpoint(
            forward_twice,
            *values,
            use_reentrant=False,
            # each layer that draws random numbers seeds the generator by the key first
            preserve_rng_state=False,
            early_stop=False,  # predictions count a whole forward
        )
        return made

    return replace(segment, run=run)


Buffers = Sequence[tuple[Place, Tensor]]


def places_of(weights: nn.Module, names: Set[str]) -> list[Place]:
    """Return where the tree has the buffers called `names`, under all their names."""
    found = [
        (f"{path}.{name}".removeprefix("."), Place(module._buffers, name), buffer)
        for path, module in weights.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    wanted = {id(buffer) for name, _, buffer in found if name in names}
    return [place for _, place, buffer in found if id(buffer) in wanted]


def _copies(places: Sequence[Place]) -> Buffers:
    held = [place.registry[place.name] for place in places]
    # One copy of a buffer that has several names.
    made = {id(buffer): buffer.detach().clone() for buffer in held if buffer is not None}
    return [(place, made[id(buffer)]) for place, buffer in zip(places, held, strict=True)]


@contextmanager
def _replaced(before: Buffers) -> Iterator[None]:
    now = [(place, place.registry[place.name]) for place, _ in before]
    for (registry, name), value in before:
        registry[name] = value
    try:
        yield
    finally:
        for (registry, name), current in now:
            registry[name] = current
