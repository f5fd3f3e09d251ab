"""Count what the operations of a step compute, and what they exchange where ranks divide the
layers.

Model FLOPs are those of the model's definition, as utilisation counts them (Chowdhery et al. 2022,
PaLM, appendix B): multiplications and additions of products, convolutions and attention. Causal
attention counts whole, though kernels leave out half of it. Recomputation does not count, nor what
is only moved or changed point by point.

Layers that ranks divide run in one process, as the first rank of a group that is not there. It
computes with its parts of the weights, as in training. Its collectives move nothing, through
PyTorch's backend `fake`: their bytes are counted, because what they take depends on the links of a
cluster and not on the model.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from planner.errors import InputError
from planner.formats.profile import DEGREE_COLUMNS, DegreeCosts, Profile
from planner.model.options import gradient_bytes
from planner.model.tensor.division import DividedWeights
from planner.model.torch_private import OpOverload, TorchDispatchMode, tree_leaves
from planner.profiler.step.timing import LayerMarks, MarkT

if TYPE_CHECKING:  # importing DTensor takes a second, which only groups are worth
    from planner.model.tensor.group import TensorGroup

_VECTORS = ("mv", "addmv", "dot")
_FUSED_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn")
# Of mixtures of experts: each group of rows has its own matrix. The last is what Transformers does
# without the first.
GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback")
# beside those that PyTorch counts
_OTHERS = ("_scaled_dot_product", *_VECTORS, *_FUSED_RECURRENT, *GROUPED)
COLLECTIVES = "_c10d_functional"  # the namespace of their operations
# What each is of a ring all-reduce, in bytes and in steps. An all-to-all waits for every other
# rank.
_SHARES = {
    "all_reduce": (1.0, 1.0),
    "all_gather_into_tensor": (0.5, 0.5),
    "reduce_scatter_tensor": (0.5, 0.5),
    "all_to_all_single": (0.5, 1.0),
}
# gloo's sends as much as its all-reduce
_GLOO_SHARES = {**_SHARES, "reduce_scatter_tensor": (1.0, 1.0)}
Totals = tuple[float, float, float]  # model FLOPs, bytes that are all-reduced, and all-reduces


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of a base class without types
    """Counts, within its context, model FLOPs and collectives as all-reduces, on tensors with data
    or without.

    PyTorch's `FlopCounterMode` counts FLOPs alike, but leaves out recurrent layers and products
    with vectors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.reduced_bytes = 0.0
        self.reduces = 0.0

    def mark(self) -> Totals:
        return self.flops, self.reduced_bytes, self.reduces

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Operations of DTensors run those of their parts, which count, instead.
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, OpOverload):
            self.saw(func, args, kwargs, out)
        return out

    def saw(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Take note of an operation that has run."""
        if _counts(func):
            self.flops += model_flops(func, args, kwargs, out)

        space, _, name = func._schema.name.partition("::")
        on_cpu = isinstance(out, Tensor) and out.device.type == "cpu"
        shares = _GLOO_SHARES if on_cpu else _SHARES
        if space.startswith(COLLECTIVES) and name in shares:
            of_bytes, of_steps = shares[name]
            self.reduced_bytes += of_bytes * max(args[0].nbytes, out.nbytes)
            self.reduces += of_steps


@dataclass(frozen=True)
class LayerCounts:
    """What each layer's forward, and its backward, computes and exchanges."""

    flops: list[tuple[int, int]]
    reduced: Mapping[str, tuple[float, ...]]  # by column of DegreeCosts


def layer_counts(marks: LayerMarks[MarkT], totals: Callable[[MarkT], Totals]) -> LayerCounts:
    """Return the counts between the marks, where `totals` reads those until a mark."""

    def columns(place: int, number: Callable[[float], float] = round) -> list[tuple[Any, ...]]:
        sums = marks.sums(lambda start, end: totals(end)[place] - totals(start)[place])
        return [tuple(map(number, column)) for column in sums]

    reduced = {}
    for place, name, number in ((1, "reduced_bytes", round), (2, "reduces", float)):
        reduced[f"forward_{name}"], reduced[f"backward_{name}"] = columns(place, number)
    forward, backward = columns(0)
    return LayerCounts(list(zip(forward, backward, strict=True)), reduced)


@cache
def _counts(func: OpOverload) -> bool:
    """Return whether calls of an operation may have FLOPs: most operations of a step have none."""
    return func._overloadpacket in flop_registry or func._schema.name.partition("::")[2].startswith(
        _OTHERS
    )


def model_flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the number of multiplications and additions of one call, counted separately."""
    name = func._schema.name.partition("::")[2]
    backward = name.endswith("backward")
    if name.startswith("_scaled_dot_product"):
        # A backward takes the gradient of the output before them.
        query, key, value = args[1:4] if backward else args[:3]
        return _attention_flops(query, key, value, backward=backward)

    registered: Callable[..., Any] | None = flop_registry.get(func._overloadpacket)
    if registered is not None:
        return int(registered(*args, **kwargs, out_val=out))

    if name in _VECTORS:
        return 2 * max(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    if name.startswith(GROUPED):
        return _grouped_flops(args[0], args[1])
    if _is_fused_recurrent(name):
        if isinstance(args[1], (list, tuple)):
            weights = args[1]
        else:
            weights = args[1:3]
        return _recurrent_flops(args[0], weights, backward=backward)

    return 0


def _is_fused_recurrent(name: str) -> bool:
    """Return whether an operation runs a recurrent network, and does not prepare its weights."""
    return name.startswith(_FUSED_RECURRENT) and "flatten" not in name and "init" not in name


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *, backward: bool) -> int:
    counted = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    flops = int(counted)
    # The kernels of the backward compute the scores again, which is no part of the model.
    return 2 * flops if backward else flops


def _grouped_flops(one: Tensor, other: Tensor) -> int:
    """Every number of the one is multiplied with a row of its group's matrix.

    Where the groups divide the other's columns (3 and 2 dimensions), each number meets its own
    group's columns alone.
    """
    groups = 1
    if one.dim() == 3 and other.dim() == 2:
        groups = one.shape[0]
    return 2 * one.numel() * other.shape[-1] // groups


def _recurrent_flops(sequence: Tensor, weights: Sequence[Tensor | None], *, backward: bool) -> int:
    """Every weight meets every step of every sample, in the backward twice."""
    met = sum(weight.numel() for weight in weights if weight is not None and weight.dim() == 2)
    products = 2 if backward else 1
    return 2 * products * sequence.shape[0] * sequence.shape[1] * met


@contextmanager
def fake_group(size: int) -> Iterator[None]:
    """Let this process be the first of so many, of which no other is there: what it sends goes
    nowhere.
    """
    # PyTorch's own tests use it; a group of ranks that are not there has no public name.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    # PyTorch puts one more "[rank0]: " before each line of an error for every group
    sys.excepthook = hook
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def first_rank(degree: int, device: torch.device) -> "Iterator[TensorGroup]":
    """Make a group of which only this process is there; raise InputError if it has joined
    others.
    """
    if dist.is_initialized():
        raise InputError(
            "tensor parallelism is profiled by one process alone, and this one has joined others",
            hint="start plan profile without torchrun; the times of all-reduces follow from the "
            "cluster's links",
        )

    from planner.model.tensor.group import TensorGroup

    with fake_group(degree):
        group = TensorGroup(degree, 0)
        assert dist.group.WORLD is not None
        group.connect(dist.group.WORLD, device)
        yield group


def degree_costs(
    part: Profile,
    division: DividedWeights,
    layers: Sequence[Mapping[str, Tensor]],
    counts: LayerCounts,
) -> DegreeCosts:
    """Return the costs of a rank's layers.

    Args:
        part: the profile of what the rank ran.
        division: what the ranks divide.
        layers: its weights, each in the first layer that uses it.
    """
    columns: dict[str, Any] = {
        name: tuple(getattr(each, name) for each in part.layers) for name in DEGREE_COLUMNS
    }
    columns["by_samples"] = division.by_samples or None
    columns["weight_bytes"] = tuple(sum(p.nbytes for p in layer.values()) for layer in layers)
    columns["gradient_bytes"] = tuple(sum(map(gradient_bytes, layer.values())) for layer in layers)
    columns |= counts.reduced
    if division.experts:
        columns["experts"] = tuple(
            max((division.experts.get(name, 0) for name in own), default=0) for own in layers
        )

    assert division.group is not None
    return DegreeCosts(degree=division.group.degree, source=part.provenance.source, **columns)
