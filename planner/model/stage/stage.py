"""Build a stage: a module that computes some layers of a LayerGraph, and holds their weights and no
others.

The layers of a stage run in the order of the graph. With those of earlier stages they include all
that they need.
"""

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.errors import CaptureError, ModelFileError
from planner.formats.files import replace
from planner.model.batch import Batch
from planner.model.buffers import statistics_of
from planner.model.capture.failure import FailuresPlaced
from planner.model.capture.graph import LOSS, GraphLayer, LayerGraph, ValueSpec
from planner.model.capture.size import MOST_EXTENTS, Extent, evaluate_number, extent_told
from planner.model.lengths import extent_of
from planner.model.options import autocasting
from planner.model.randomness import RandomKey, keep_state
from planner.model.stage import parts
from planner.model.stage.chunked_loss import without_chunks
from planner.model.stage.graph_stage import SegmentBuilder, StageBlocks, numbers_of
from planner.model.stage.parts import AS_CAPTURED, Boundary, LayerObserver, Segment, Variant
from planner.model.stage.units import Units, units_of
from planner.model.stage.weights import join_weights, recurrent_modules, use_registries, weights_of
from planner.model.tensor.division import DividedWeights
from planner.model.torch_private import TreeSpec

TRAINING = 5  # batch_norm's argument


class StageModule(nn.Module):
    """Some layers of a model, made by `build_stage`.

    Its parameters and buffers are those of the original model: the same objects under the same
    names, each tied parameter under all its names. It keeps no graph and no node: these lead to the
    whole model's weights.
    """

    units: Units | None  # of which replicas divide the weights
    used_dtypes: dict[str, torch.dtype]  # of weights that are divided so, as computations use them

    def __init__(
        self,
        graph: LayerGraph,
        boundary: Boundary,
        weights: nn.Module,
        code: Segment,
        # where the user's file makes each value of the code, by the value's name
        places: Mapping[str, str],
        division: DividedWeights,
        specs: Mapping[fx.Node, ValueSpec],  # of the values that it exchanges
        units: Units | None = None,
    ) -> None:
        super().__init__()
        self.layer_names = tuple(layer.name for layer in boundary.layers)
        # Values that come from earlier stages, and that later ones use or that were to be kept, as
        # they are made.
        self.received = tuple(specs[node] for node in boundary.received)
        self.sent = tuple(specs[node] for node in boundary.sent)
        # values and weights without a gradient, as one process leaves them
        self.off_loss = graph.off_loss
        # values that no stage sends
        self.made_by_all = frozenset(node.name for node in graph.fixed)
        self.has_loss = boundary.loss is not None  # whether `forward` returns the loss
        # the only number of samples that the stage takes, if any
        self.fixed_batch_size = graph.batch_size
        # that the stage can be trained on
        self.least_batch_size = _least_batch_size(boundary.layers)
        self.lengths = graph.lengths  # of the batch, that vary
        self.division = division  # which of its weights are parts
        self.__dict__["units"] = units  # they are no modules of the model
        # of the inputs, the received values and the numbers: the sent values, then the loss
        self._code = code
        self._failures = FailuresPlaced(places, in_parts=bool(division.cuts))
        self._inputs = tuple((index, graph.specs.get(leaf)) for index, leaf in boundary.inputs)
        self._batch_spec = graph.batch_spec
        self._constants = graph.constants
        self._written = {index for index, leaf in boundary.inputs if leaf in graph.written}
        self._expressions = tuple(numbers_of(graph, boundary).values())  # in the batch size
        # by the shapes they are for
        self._numbers: dict[tuple[tuple[torch.Size, torch.dtype], ...], list[Any]] = {}
        self._results = (*(spec.name for spec in self.sent), *([LOSS] if self.has_loss else []))
        self.options = graph.options
        # names of buffers, of the whole model: the stage itself has bare modules
        self.statistics = statistics_of(graph.model)
        self._recurrent = recurrent_modules(graph, boundary.layers)
        self._key = RandomKey()
        self._observer: LayerObserver | None = None
        # The generated code looks the weights up in a module of their own. The stage shares that
        # module's registries, so that .to(), state_dict() and the like see the weights. From here
        # on nn.Module's assignment would write to them where the model has the same names.
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[registry] = getattr(weights, registry)

    def extent(self, batch: Batch) -> Extent:
        """Return the extent of a batch; raise ModelFileError for a length that is beyond what
        lengths() says.
        """
        return extent_of(batch, self.lengths)

    @property
    def needs_batch(self) -> bool:
        """Whether `forward` reads model inputs or targets."""
        return bool(self._inputs)

    def set_random_key(self, seed: int, minibatch: int, microbatch: int) -> None:
        """Make each layer that draws random numbers seed its device's generator first, by these and
        its number.
        """
        self._key.set(seed, minibatch, microbatch)

    def arrange(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
        """Lay out `tensors`, which stand for some of the stage's `parameters` one for one, as their
        kernels need it.
        """
        standing_for = {
            id(parameter): tensor for parameter, tensor in zip(parameters, tensors, strict=True)
        }
        for module, names in self._recurrent:
            weights = [standing_for.get(id(self.get_parameter(name))) for name in names]
            known = [weight for weight in weights if weight is not None]
            if len(known) == len(weights):
                join_weights(module, known)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StageModule":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        parameters = list(self.parameters())
        # not their `data`, whose new place would not be theirs
        self.arrange(parameters, parameters)
        return self

    def set_observer(self, observer: LayerObserver | None) -> None:
        """Tell `observer` of every layer from now on; the stage must have been built observable."""
        self.__dict__["_observer"] = observer

    def forward(self, batch: Batch | None, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the layers; return the values in `self.sent` by name, and "loss" where the stage has
        it.

        The batch may be None when `needs_batch` is False.

        Raises:
            ModelFileError: when the batch is not like the example batch.
            LayerError: when a captured operation fails, with its place in the user's file.
        """
        inputs = self._read(batch) if self._inputs else []
        values = [received[spec.name] for spec in self.received]
        numbers = self._numbers_for(inputs, values)
        tensors = values or [
            leaf for leaf in (*inputs, *self.parameters()) if isinstance(leaf, Tensor)
        ]
        device = tensors[0].device if tensors else torch.device("cpu")
        with autocasting(device.type, self.options.autocast), self._failures:
            results = self._code.run(device, self._key, self._observer, *inputs, *values, *numbers)
        return dict(zip(self._results, results, strict=True))

    def _read(self, batch: Batch | None) -> list[Any]:
        if batch is None:
            raise ModelFileError(
                "this stage reads the batch, but got none", hint="pass the batch to every stage"
            )

        leaves, spec = batch.flatten()
        self._check_structure(spec)
        self._check_constants(leaves)

        # The batch may be read again, by another stage or to recompute this one.
        for place in self._written:
            leaves[place] = leaves[place].clone()
        targets = spec.children()[-1].num_leaves
        arguments = len(leaves) - targets
        read = []
        for index, _ in self._inputs:
            leaf = leaves[index]
            if index < arguments and isinstance(leaf, Tensor):
                leaf = self.options.input(leaf)
            read.append(leaf)

        return read

    def _check_structure(self, spec: TreeSpec) -> None:
        if spec == self._batch_spec or _structure(spec) == _structure(self._batch_spec):
            return
        raise ModelFileError(
            f"a batch's (args, kwargs, target) are {_outline(spec)}, but those of "
            f"example_batch() were {_outline(self._batch_spec)}",
            hint="dataset() and example_batch() must give the model the same arguments",
        )

    def _check_constants(self, leaves: Sequence[Any]) -> None:
        for place, captured in self._constants.items():
            if not _is_same(leaves[place], captured):
                raise ModelFileError(
                    f"a batch has {_named(leaves[place])} where example_batch() had "
                    f"{_named(captured)}, and what is no tensor is part of the captured model",
                    hint="leave it out of the batch, or let example_batch() and dataset() give a "
                    "tensor with one element for each sample",
                )

    def _numbers_for(self, inputs: Sequence[Any], received: Sequence[Tensor]) -> Sequence[Any]:
        """Return the numbers that the code takes with these values, whose dtypes and shapes are
        checked.
        """
        tensors = list(received)
        specs = list(self.received)
        for (_, spec), leaf in zip(self._inputs, inputs, strict=True):
            if spec is not None:
                tensors.append(leaf)
                specs.append(spec)

        # A list is made faster than a generator is read, and this runs for every microbatch.
        shapes = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        if shapes not in self._numbers:
            extent = self._extent_of(specs, tensors)
            _check_tensors(specs, tensors, extent)
            if len(self._numbers) >= MOST_EXTENTS:
                self._numbers.clear()
            self._numbers[shapes] = [
                evaluate_number(expression, extent) for expression in self._expressions
            ]

        return self._numbers[shapes]

    def _extent_of(self, specs: Sequence[ValueSpec], tensors: Sequence[Tensor]) -> Extent:
        """Return the extent that the sizes of these values tell."""
        pairs = [
            pair
            for spec, tensor in zip(specs, tensors, strict=True)
            for pair in zip(spec.sizes, tensor.shape, strict=False)
        ]
        extent = extent_told(
            tuple(size for size, _ in pairs), (value for _, value in pairs), len(self.lengths)
        )
        if self.fixed_batch_size is None:
            return extent
        if isinstance(extent, tuple):
            return (self.fixed_batch_size, *extent[1:])
        return self.fixed_batch_size


def _check_tensors(specs: Sequence[ValueSpec], tensors: Sequence[Tensor], extent: Extent) -> None:
    """Raise ModelFileError for a tensor that is not as the model was captured with."""
    for spec, tensor in zip(specs, tensors, strict=True):
        shape = spec.shape(extent)
        if tensor.dtype != spec.dtype or tensor.shape != shape:
            raise ModelFileError(
                f"batch input '{spec.name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"the model was captured with {spec.dtype} of shape {shape}",
                hint="dataset() and example_batch() must give tensors of the same shape and dtype",
            )


def _is_same(leaf: Any, captured: Any) -> bool:
    """Return whether a leaf of a batch is what the graph has in its place."""
    return leaf is captured or (type(leaf) is type(captured) and bool(leaf == captured))


def _named(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "a tensor"
    return reprlib.repr(leaf)


def _structure(spec: TreeSpec) -> object:
    """Return the structure with lists as tuples, because a DataLoader makes lists of a dataset's
    tuples.
    """
    kind = tuple if spec.type is list else spec.type
    return kind, spec.context, [_structure(child) for child in spec.children()]


def _outline(spec: TreeSpec) -> str:
    """Return the structure with a star for each leaf: ((*, *), {'mask': *}, *)."""
    return repr(spec.unflatten(["*"] * spec.num_leaves)).replace("'*'", "*")


def _least_batch_size(layers: Iterable[GraphLayer]) -> int:
    """Return 2 where a BatchNorm has one value per channel and sample, of which there is no
    variance; else 1.
    """
    for node in (node for layer in layers for node in layer.nodes):
        if node.target is torch.ops.aten.batch_norm.default and node.args[TRAINING]:
            positions = node.args[0].meta["val"].shape[2:]  # type: ignore[union-attr]
            if all(isinstance(size, int) for size in positions) and math.prod(positions) == 1:
                return 2
    return 1


def build_stage(
    graph: LayerGraph,
    layer_names: Sequence[str],
    keep: Sequence[str] = (),
    variant: Variant = AS_CAPTURED,
    of: StageModule | None = None,
    before: Collection[str] | None = None,
) -> StageModule:
    """Return the stage of `graph` that computes the layers named; stages share the graph's
    parameters.

    Args:
        keep: further values made here that `forward` returns, for instance the model's outputs.
        of: the same stage in training, for one with units, which are its own then.
        before: the layers of earlier stages; by default those that stand before this stage's first
            one, and then its own must follow one another.
    """
    for name in layer_names:
        if name not in graph.position:
            raise CaptureError(
                f"the model has no layer '{name}'", hint="was the plan made for this model?"
            )

    positions = [graph.position[name] for name in layer_names]
    earlier = _earlier(graph, positions, before)
    later = set(range(len(graph.layers))) - earlier - set(positions)
    boundary = parts.stage_boundary(graph, positions, later, keep)

    # again, for deferred weights: they were made after the capture
    graph.options.prepare(graph.model)
    blocks = None
    if graph.blocks is None:
        weights = weights_of(graph, boundary.layers)
    else:
        blocks = StageBlocks(graph, boundary, variant)
        weights = blocks.weights

    if of is not None:
        use_registries(weights, of)

    borders = [*boundary.received, *boundary.sent]
    division = variant.division.within(graph, borders)
    specs = {node: division.exchanged(node, graph.specs[node]) for node in borders}
    segments, places = _segments(
        graph, boundary, replace(variant, division=division), weights, blocks
    )
    units = None
    if variant.units:
        units = units_of(graph, variant.units) if of is None else of.units
        assert units is not None
        segments = units.wrapped(segments, variant.units)

    takes = [node.name for node in (*boundary.takes, *numbers_of(graph, boundary))]
    code = parts.joined(segments, takes, [node.name for node in boundary.makes])
    if units is not None:
        code = replace(code, run=partial(units.whole, code.run))
    return StageModule(graph, boundary, weights, code, places, variant.division, specs, units)


def _segments(
    graph: LayerGraph,
    boundary: Boundary,
    variant: Variant,
    weights: nn.Module,
    blocks: StageBlocks | None,
) -> tuple[list[Segment], dict[str, str]]:
    """Return the segments of a stage in order, and where the user's file makes each value of their
    code, by the value's name.

    A segment is a unit where replicas divide weights, else what recomputes together or lies between
    two such groups.
    """
    units = [names for names in variant.units if names]
    groups: Sequence[Sequence[str]] = units or variant.recompute
    if variant.loss_chunks > 1:
        groups = without_chunks(graph, boundary.positions, groups)

    segments = []
    places: dict[str, str] = {}
    for part, recomputes in parts.divided(graph, boundary, groups):
        builder = SegmentBuilder(graph, part, variant, weights, blocks)
        segment = builder.build()
        places |= builder.places
        if units:
            names = tuple(layer.name for layer in part.layers)
            recomputes = names in variant.recompute
        if recomputes:
            written = parts.places_of(weights, builder.written())
            segment = parts.recomputing(segment, written, places)
        segments.append(segment)

    return segments, places


def _earlier(
    graph: LayerGraph, positions: Sequence[int], before: Collection[str] | None
) -> set[int]:
    """Return the positions of the layers before a stage; raise CaptureError if it cannot run after
    them.
    """
    names = [graph.layers[position].name for position in positions]
    in_a_row = bool(positions) and positions == list(
        range(positions[0], positions[0] + len(positions))
    )
    if before is None and not in_a_row:
        raise CaptureError(
            f"the layers {names} do not follow one another in the model",
            hint="say which layers are before them",
        )

    if before is None:
        return set(range(positions[0]))

    earlier = {graph.position[name] for name in before}
    if not positions or positions != sorted(set(positions) - earlier):
        raise CaptureError(
            f"the layers {names} are not in the model's order, or not all in this stage alone",
            hint="make the plan again with: plan solve",
        )

    known = earlier | set(positions)
    for position, name in zip(positions, names, strict=True):
        missing = graph.needs[position] - known
        if missing:
            needed = graph.layers[min(missing)].name
            raise CaptureError(
                f"layer '{name}' needs '{needed}', which is in a later stage",
                hint="make the plan again with: plan solve",
            )

    return earlier


def warm_up(stage: StageModule, batch: Batch) -> None:
    """Run `stage` on zeros instead of what earlier stages send, then restore buffers and random
    state.

    The batch is any of the size to come, on the same device.
    """

    extent = stage.extent(batch)

    def zeros(spec: ValueSpec) -> Tensor:
        # Through the wire, because compiled code depends on the strides that a received value has.
        wire = torch.zeros(spec.wire_shape(extent), dtype=spec.dtype, device=device)
        return spec.from_wire(wire, extent).requires_grad_(spec.requires_grad)

    with keep_state(stage) as device:
        results = stage(
            batch if stage.needs_batch else None,
            {spec.name: zeros(spec) for spec in stage.received},
        )
        roots = [
            value for value in results.values() if value.requires_grad and value.grad_fn is not None
        ]
        if roots:
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])

    for parameter in stage.parameters():
        parameter.grad = None
