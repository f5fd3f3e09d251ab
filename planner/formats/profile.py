"""The Profile: what each layer of a model costs on a device. `plan profile` writes it, `plan solve`
reads it.

Layers are in execution order: edges go from earlier to later layers. Model inputs are neither
layers nor edges: each stage that needs one reads it from the data itself. If the model file defines
a loss, it is the last layer.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isqrt
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from planner.errors import ProfileError
from planner.formats.files import GrownRecord, Record, load_record, replace, save_record
from planner.formats.names import EightBits, StackName
from planner.formats.quantities import (
    MOST_GPUS,
    Bytes,
    FloatingOperations,
    NonNegativeFloat,
    Number,
    PositiveFloat,
    Samples,
    Seconds,
    SomeBytes,
    Threads,
)
from planner.formats.shown import Shown

_log = logging.getLogger(__name__)

Share = Annotated[float, Field(ge=0, le=1)]
Autocast = Literal["bfloat16", "float16"]
MemoryFormat = Literal["channels-last"]
UNKNOWN_WEIGHT_SHARE = 0.5  # of a backward, for the gradients of weights
TF32 = "tf32"  # as a profile's dtype: float32 in memory, products of matrices in TF32

REMEDY = "make a profile with: plan profile model.py"
KIND_COLUMNS = (
    "forward_s",
    "backward_s",
    "update_s",
    "accumulate_s",
    "workspace_bytes",
    "update_workspace_bytes",
)
_HELD = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "saved_bytes")
DEGREE_COLUMNS = (*KIND_COLUMNS, *_HELD)


class Value(Record):
    """A tensor that a layer passes to later layers; bytes are for one microbatch."""

    name: str
    output_bytes: Bytes
    gradient_bytes: Bytes  # 0 where no gradient flows back (integers, booleans, detached tensors)
    element_bytes: SomeBytes | None = None  # None: 4, or 2 under autocast


class Layer(Record):
    """The unit that a plan assigns to stages: a group of operations, usually a leaf module."""

    name: str  # unique; the module path where there is one
    op: str  # the kind of layer, for people: "Conv2d", "aten.add"
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds  # the optimizer's step on this layer's parameters
    # Of every microbatch of a minibatch, except the first; however few samples it has, so not as
    # the other times.
    # extra time of a backward for gradient accumulation; 0 also where not measured
    accumulate_s: Seconds = 0.0
    # Of `backward_s`, for the gradients of weights, which a schedule may compute later than those
    # of inputs; None where that was neither measured nor estimated.
    weight_share: Share | None = None
    forward_spread_s: Seconds = 0.0  # interquartile range over the repeats
    backward_spread_s: Seconds = 0.0
    # on a CPU: processor time, without the time that other processes had
    forward_thread_s: Seconds | None = None
    backward_thread_s: Seconds | None = None
    accumulate_thread_s: Seconds | None = None
    outputs: tuple[Value, ...] = ()  # values that later layers use
    # parameters, trainable or not; tied parameters count in the first layer that uses them
    weight_bytes: Bytes = 0
    gradient_bytes: Bytes = 0  # the trainable part of weight_bytes
    optimizer_bytes: Bytes = 0  # state of the user's optimizer
    buffer_bytes: Bytes = 0
    saved_bytes: Bytes = 0  # kept from forward to backward for one microbatch, weights excluded
    # Peak of temporary memory in forward or backward, per microbatch, beyond weights, their
    # gradients and saved bytes.
    workspace_bytes: Bytes = 0  # 0 if not measured
    update_workspace_bytes: Bytes = 0  # peak of temporary memory in the optimizer's step
    # Multiplications and additions of products, convolutions and attention, for one microbatch;
    # None: not counted.
    forward_flops: FloatingOperations | None = None
    backward_flops: FloatingOperations | None = None
    parameters: tuple[str, ...] = ()  # fully qualified names

    @property
    def backward_weight_s(self) -> float:
        """Seconds of the backward for the gradients of weights.

        Where nobody knows them, they are half of it in layers that have weights, which for products
        of matrices is one product of two; on Transformer layers on a CPU, 46 to 47% were measured.
        """
        share = self.weight_share
        if share is None:
            share = UNKNOWN_WEIGHT_SHARE if self.gradient_bytes or self.parameters else 0.0
        return share * self.backward_s

    @property
    def flops(self) -> int | None:
        """Of forward and backward; None where they were not counted."""
        counts = self.forward_flops, self.backward_flops
        if None in counts:
            return None
        return sum(count or 0 for count in counts)


class Edge(Record):
    """Layer `target` uses the output `value` of layer `source`."""

    source: str
    value: str
    target: str


class Device(GrownRecord):
    """The device that the times were measured on, or estimated for."""

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {"context_bytes", "peak_flops_per_s", "shares_of"}
    )

    kind: str  # "cpu", "cuda"
    name: str
    threads: Threads | None = None  # intra-op threads, on a CPU
    processes: Threads | None = None  # training at the same time, the measured one included
    memory_bytes: SomeBytes | None = None
    # of its memory that a process takes beside tensors, on CUDA; None: not measured
    context_bytes: Bytes | None = None
    peak_flops_per_s: PositiveFloat | None = None  # of an estimate's device, in the profile's dtype
    # Of an estimate's device: the one whose kernels were measured in place of its own; None where
    # its own were.
    shares_of: str | None = None


class _Times(Record):
    """What layers cost where they run in another way, in the profile's order."""

    source: Literal["measured", "estimated", "imported"]
    forward_s: tuple[Seconds, ...]
    backward_s: tuple[Seconds, ...]
    update_s: tuple[Seconds, ...]
    accumulate_s: tuple[Seconds, ...]
    workspace_bytes: tuple[Bytes, ...]
    update_workspace_bytes: tuple[Bytes, ...]

    def applied_to(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return the profile's layers with these costs."""
        return [
            replace(
                layer,
                forward_s=self.forward_s[number],
                backward_s=self.backward_s[number],
                update_s=self.update_s[number],
                accumulate_s=self.accumulate_s[number],
                workspace_bytes=self.workspace_bytes[number],
                update_workspace_bytes=self.update_workspace_bytes[number],
            )
            for number, layer in enumerate(layers)
        ]


class DegreeCosts(_Times):
    """What one of `degree` ranks that divide every layer between them has to do and to hold, layer
    by layer.

    Times are without the all-reduces of activations in the group.
    """

    degree: Annotated[int, Field(ge=2, le=MOST_GPUS)]
    weight_bytes: tuple[Bytes, ...]
    gradient_bytes: tuple[Bytes, ...]
    optimizer_bytes: tuple[Bytes, ...]
    buffer_bytes: tuple[Bytes, ...]
    saved_bytes: tuple[Bytes, ...]
    # that the ranks all-reduce in a forward of one microbatch
    forward_reduced_bytes: tuple[Bytes, ...]
    backward_reduced_bytes: tuple[Bytes, ...]
    forward_reduces: tuple[NonNegativeFloat, ...]  # in so many all-reduces; a gather is half of one
    backward_reduces: tuple[NonNegativeFloat, ...]
    # each has a part of a microbatch's samples, and they divide experts alone
    by_samples: Literal[True] | None = None
    experts: tuple[Number, ...] | None = None  # of mixtures, which the ranks divide between them
    # Gradients that all ranks have alike, and sum once per update, in estimates of experts that
    # ranks divide as no executor here does; None where they are summed in each backward.
    alike_bytes: tuple[Bytes, ...] | None = None
    # Experts that a token chooses, where it is sent to each server once for all of them there; None
    # where it is sent once for each.
    copies: PositiveFloat | None = None
    # ranks of the group that divide the sequences of a microbatch; the others divide layers
    context: Annotated[int, Field(ge=2, le=MOST_GPUS)] | None = None
    # the same with sequence parallelism; None where that was not measured
    by_tokens: "DegreeCosts | None" = None

    def applied_to(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return the profile's layers with these costs, and with what one rank of them holds."""
        return [
            replace(
                layer,
                weight_bytes=self.weight_bytes[number],
                gradient_bytes=self.gradient_bytes[number],
                optimizer_bytes=self.optimizer_bytes[number],
                buffer_bytes=self.buffer_bytes[number],
                saved_bytes=self.saved_bytes[number],
            )
            for number, layer in enumerate(super().applied_to(layers))
        ]


class KindTimes(GrownRecord, _Times):
    """What the profile's layers cost on one kind of device, in their order."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"tensor", "weight_shares"})

    name: str  # for the cluster's `kinds`
    device: Device
    # `weight_share` of each layer there; None where no layer's is known
    weight_shares: tuple[Share | None, ...] | None = None
    # with layers divided over several ranks, by ascending degree
    tensor: tuple[DegreeCosts, ...] | None = None

    def applied_to(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return the profile's layers with these costs."""
        shares = self.weight_shares or (None,) * len(layers)
        timed = super().applied_to(layers)
        return [
            replace(layer, weight_share=share) for layer, share in zip(timed, shares, strict=True)
        ]


class WholeStep(Record):
    """One training step of the unsplit model, to compare with the sum of the layers."""

    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds
    forward_thread_s: Seconds | None = None
    backward_thread_s: Seconds | None = None


class Compiled(Record):
    """How layers were timed under torch.compile, which fuses them so that a time belongs to several
    layers.

    A layer's time is the time of its compiled run of layers, times the layer's share of the
    uncompiled run; all times are scaled to add up to the whole model compiled at once, unless the
    model file names blocks.
    """

    runs: tuple[str, ...]  # the first layer of each
    runs_forward_s: Seconds  # sum over the runs, before scaling
    runs_backward_s: Seconds
    uncompiled_forward_s: Seconds  # of the whole step
    uncompiled_backward_s: Seconds


class Cause(Record):
    """Why operations cannot be cut, as a sentence about 'they', and what helps."""

    reason: str
    hint: str


class Uncut(Record):
    """Operations that share a layer, many of the model's."""

    layer: str
    operations: Annotated[int, Field(ge=1)]
    of: Annotated[int, Field(ge=1)]  # all operations of the model and the loss
    cause: Cause


class ForbiddenLabel(Record):
    """A label, or a value of a mask, with which the loss is not what the plan takes it for:
    training refuses it.
    """

    # number of the tensor among the batch's leaves: arguments, then the target
    leaf: Annotated[int, Field(ge=0)]
    value: int


class LossMean(GrownRecord):
    """What the loss of a batch is a mean over: each microbatch counts by its share of this."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"leaf", "forbidden", "reason"})

    # loss_weight: what the model file's loss_weight(target) counts; sum: it is the sum over its
    # parts; batch: no mean; unchecked: the model was run, and nothing told one from another
    over: Literal["samples", "labels", "loss_weight", "sum", "batch", "unchecked"]
    ignored: int | None = None  # with "labels": the label that does not count
    shifted: bool = False  # with "labels": each sample's first label does not count
    # With "batch" or "unchecked", in a plan: the user takes the mean of the microbatches' losses.
    accepted: bool = False
    # With "labels": their number among the batch's leaves. None: the target's only tensor of
    # integers with several per sample, or the model's argument `labels`.
    leaf: Annotated[int, Field(ge=0)] | None = None
    forbidden: tuple[ForbiddenLabel, ...] = ()
    reason: str | None = None  # with "unchecked"

    @property
    def weighs(self) -> bool:
        """Whether the parts of a batch count unequally, or are added up."""
        return self.over in ("labels", "loss_weight", "sum")

    @property
    def divisible(self) -> bool:
        """Whether the losses of parts, weighted, were seen to add up to the loss of the batch."""
        return self.over not in ("batch", "unchecked")

    @property
    def words(self) -> str:
        """What it is, for people."""
        if self.over == "labels":
            first = ""
            if self.shifted:
                first = ", each sample's first one left out"
            return f"mean over the labels that are not {self.ignored}{first}"

        return {
            "samples": "mean over samples",
            "loss_weight": "mean over what loss_weight(target) counts",
            "sum": "sum over samples",
            "batch": "of the whole batch: not a weighted mean of the losses of its parts",
            "unchecked": f"not checked: {self.reason}",
        }[self.over]


class ChunkedLoss(Record):
    """A head and a loss that are computed for a part of the tokens at a time."""

    chunks: Annotated[int, Field(ge=2)]  # parts of the tokens
    head: str  # layer that makes the logits, of which those of one part exist
    # what the backward takes longer in training, where each part computes its logits a second time;
    # it is in no price
    again_s: NonNegativeFloat


class Disturbance(Record):
    """What disturbed a measurement on a CPU: then times are longer than an idle machine's."""

    # of the steps, in which they had no core
    waited_share: Share | None = None
    others_cores: NonNegativeFloat | None = None  # in older files
    drift: float | None = None  # how much longer steps took in a second measurement; 0.1 is 10%


class Provenance(Record):
    """How the numbers were obtained."""

    tool: str
    torch: str | None = None
    date: str | None = None
    repeats: int | None = None
    source: Literal["measured", "estimated", "imported"]
    disturbance: Disturbance | None = None  # None where it was not looked for
    # estimated with the model file's example batch and weights, which decide
    sizes: Literal["example"] | None = None


Shares = tuple[float, ...]


class Fit(Record):
    """How a cost grows with the lengths of a batch, as a sum of shares of what the profile says of
    it.

    There is a share for 1, for each length, and for each product of two lengths (x, y, xx, xy, yy),
    where a length counts as a part of the greatest. The shares of a profile that was made at the
    greatest lengths add up to about 1.
    """

    shares: Shares
    residual: NonNegativeFloat  # root mean square of what the fit misses, by the mean cost

    @property
    def kind(self) -> Literal["constant", "linear", "quadratic"]:
        """How the cost grows with the lengths, by the highest power that it has."""
        lengths = (isqrt(8 * len(self.shares) + 1) - 3) // 2
        if any(self.shares[1 + lengths :]):
            return "quadratic"
        if any(self.shares[1:]):
            return "linear"
        return "constant"


class LayerFits(Record):
    """How a layer's costs grow; its weights do not."""

    forward_s: Fit
    backward_s: Fit
    saved_bytes: Fit
    flops: Fit  # forward and backward
    outputs: tuple[Fit, ...]


class VaryingLengths(Record):
    """Lengths of batches that vary, each by its name between the least and the greatest."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    least: tuple[int, ...]
    most: tuple[Samples, ...]
    # random: samples come in any order; buckets: in minibatches of similar length; given: as the
    # profile lists them
    order: Literal["random", "buckets", "given"]


class Lengths(VaryingLengths):
    """How costs depend on lengths, and how often each comes."""

    profiled: tuple[tuple[int, ...], ...]  # that costs were measured at, or estimated for
    layers: tuple[LayerFits, ...]
    # for each name, its length in some samples
    samples: Annotated[tuple[tuple[int, ...], ...], Field(min_length=1)]


class Profile(Shown, GrownRecord):
    """A model's costs per layer on one device, for one microbatch."""

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {"lengths", "capture_checked", "uncut", "base_bits", "products", "stack", "chunked_loss"}
    )

    schema_version: Literal[1] = 1
    model: str
    graph_hash: str | None = None  # hash of the captured graph; None for imported profiles
    device: Device
    dtype: str | None = None
    autocast: Autocast | None = None  # measured under torch.autocast, and to be trained so
    # of the weights, which have copies in float32 that the optimizer steps
    master_weights: Autocast | None = None
    # Of each frozen weight beside adapters, in estimates alone; None where they are whole numbers
    # of bytes.
    base_bits: Literal[4] | None = None
    # of linear layers, in estimates alone; None where they are in the type of the weights
    products: EightBits | None = None
    stack: StackName | None = None  # whose kernels were estimated
    # with memory for the logits of a part of the tokens, in estimates alone
    chunked_loss: ChunkedLoss | None = None
    memory_format: MemoryFormat | None = None  # of weights and images; None for the model's own
    compiled: Compiled | None = None  # measured through torch.compile, and to be trained so
    # measured with deterministic algorithms, and to be trained so
    deterministic: Literal[True] | None = None
    # Only then may replicas divide its state. None in older profiles, and where nothing is trained.
    optimizer_elementwise: bool | None = None  # whether replicas can divide its state
    # Whether each parameter's update depends on its own gradients alone; None in older profiles,
    # and in estimates.
    optimizer_separable: bool | None = None
    microbatch_size: Samples | None = None  # samples; None where the source does not say
    loss: LossMean | None = None  # what it is a mean over; None where that was not checked
    # the model and its captured layers were run, with equal gradients
    capture_checked: Literal[True] | None = None
    tokens_per_sample: Samples | None = None  # length of sequences of token ids
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    edges: tuple[Edge, ...]
    no_cut_after: tuple[str, ...] = ()  # layers that must share a stage with the next one
    uncut: tuple[Uncut, ...] = ()  # layers of many operations, between which a cut would be of use
    # each group: the names of one and the same parameter
    tied_parameters: tuple[tuple[str, ...], ...] = ()
    whole_step: WholeStep | None = None
    # on each of several kinds of devices; the layers' own are the first's
    kinds: tuple[KindTimes, ...] | None = None
    # with layers divided over several ranks, by ascending degree
    tensor: tuple[DegreeCosts, ...] | None = None
    # that vary; all other costs are then those of the greatest lengths
    lengths: Lengths | None = None
    provenance: Provenance

    @model_validator(mode="after")
    def _check_graph(self) -> "Profile":
        position = {layer.name: index for index, layer in enumerate(self.layers)}
        if len(position) < len(self.layers):
            twice, _ = Counter(layer.name for layer in self.layers).most_common(1)[0]
            raise ValueError(f"layer name '{twice}' occurs twice")

        self._check_edges(position)
        unknown = set(self.no_cut_after) - position.keys()
        if unknown:
            raise ValueError(f"no_cut_after names the unknown layer '{min(unknown)}'")

        self._check_columns()
        return self

    def _check_edges(self, position: Mapping[str, int]) -> None:
        """Raise ValueError for an edge between unknown layers, of an unknown value, or backwards;
        `position` is that of each layer.
        """
        produced = {(layer.name, value.name) for layer in self.layers for value in layer.outputs}
        for edge in self.edges:
            shown = f"edge '{edge.source}' -> '{edge.target}'"
            unknown = {edge.source, edge.target} - position.keys()
            if unknown:
                raise ValueError(f"{shown} names the unknown layer '{min(unknown)}'")
            if (edge.source, edge.value) not in produced:
                raise ValueError(f"{shown} carries the unknown value '{edge.value}'")
            if position[edge.source] >= position[edge.target]:
                raise ValueError(f"{shown} goes backwards; layers stand in execution order")

    def _check_columns(self) -> None:
        """Raise ValueError for costs that are not of each layer, and for degrees in disorder."""
        for name, record in self._columns():
            counts = {
                len(value)
                for field, value in dict(record).items()
                if isinstance(value, tuple) and field != "tensor"
            }
            if counts != {len(self.layers)}:
                raise ValueError(f"{name} has not one value for each of {len(self.layers)} layers")

        for tensor in (self.tensor, *(kind.tensor for kind in self.kinds or ())):
            degrees = [costs.degree for costs in tensor or ()]
            if degrees != sorted(set(degrees)):
                raise ValueError(f"the tensor-parallel degrees {degrees} do not ascend")

        if self.lengths is not None:
            outputs = [len(fits.outputs) for fits in self.lengths.layers]
            if outputs != [len(layer.outputs) for layer in self.layers]:
                raise ValueError(
                    "lengths has not one fit for each layer and each value that it passes on"
                )

    def _columns(self) -> Iterator[tuple[str, Record]]:
        """Yield the records that have a value for each layer, with their names for people."""
        for kind in self.kinds or ():
            yield f"the kind '{kind.name}'", kind
        of_kinds = [costs for kind in self.kinds or () for costs in kind.tensor or ()]
        for costs in (*(self.tensor or ()), *of_kinds):
            name = f"the tensor-parallel degree {costs.degree}"
            yield name, costs
            if costs.by_tokens is not None:
                yield f"{name} by tokens", costs.by_tokens

    def save(self, path: Path | str = "profile.json") -> None:
        """Write the profile to a file."""
        save_record(self, path)

    @property
    def trainable(self) -> bool:
        """Whether there is a model to train: an imported profile has only costs."""
        return self.graph_hash is not None

    @property
    def may_shard_optimizer(self) -> bool:
        """Whether replicas may divide the optimizer's state: never where an unknown optimizer would
        train a model.
        """
        separable = self.optimizer_separable is not False
        return (bool(self.optimizer_elementwise) and separable) or not self.trainable

    @property
    def flops(self) -> int | None:
        """Model FLOPs of one microbatch, forward and backward; None where a layer's were not
        counted.
        """
        counts = [layer.flops for layer in self.layers]
        if None in counts:
            return None
        return sum(count or 0 for count in counts)

    @property
    def tf32(self) -> bool:
        return self.dtype == TF32

    @property
    def digest(self) -> str:
        """SHA-256 of the content, without fields that have no value: new ones do not change older
        profiles' digests.
        """
        known = any(layer.accumulate_s for layer in self.layers)
        unknown = None
        if not known:
            unknown = {"layers": {"__all__": {"accumulate_s"}}}
        return hashlib.sha256(
            self.model_dump_json(exclude=unknown, exclude_none=True).encode()
        ).hexdigest()


def has_experts(op: str) -> bool:
    """Return whether a kind of layer has experts, as captured, or as a module that is one layer."""
    return "grouped_mm" in op or op.endswith("Experts")


def load_profile(path: Path | str) -> Profile:
    """Read `profile.json`; raise ProfileError naming the file, the field and the value that is
    wrong.

    Example:
        >>> planner.load_profile("profiles/vgg16/cpu.json").microbatch_size
        32
    """
    return load_record(Profile, path, ProfileError, REMEDY)


def save_profile(profile: Profile, path: Path | str) -> None:
    """Write `profile` to `path` atomically."""
    save_record(profile, path)


def replace_profile(profile: Profile, path: Path) -> None:
    """Save a profile; one of another model, or a measured one that an estimate would replace, is
    kept beside it.
    """
    with suppress(ProfileError):  # there is none, or it is no profile
        old = load_profile(path)
        source = old.provenance.source
        if old.model != profile.model or (
            source == "measured" and profile.provenance.source != source
        ):
            kept = path.with_name(
                f"{path.stem}-{old.model.replace(':', '-')}-{source}{path.suffix}"
            )
            path.replace(kept)
            _log.warning(f"{path} was the {source} profile of '{old.model}': it is {kept} now")

    save_profile(profile, path)
