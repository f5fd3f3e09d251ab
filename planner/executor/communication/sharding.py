"""Divide a stage's optimizer over its replicas: each sums, updates and keeps state for a part of
the weights.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC20, stage 1. After
the last backward of a round, gradients are added up where they are needed alone (a reduce-scatter);
each replica steps its own part; then all get the others' weights (an all-gather). Together that is
what an all-reduce sends.

What the optimizer must see whole has one owner: see `planner.model.elementwise`. PyTorch's
ZeroRedundancyOptimizer leaves no room for several weight versions or for units in flight, nor does
`fully_shard`, which a single stage has at level 2 or 3: see
`planner.executor.communication.fully_sharded`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import ModelFileError
from planner.executor.communication.gradients import Bucket, WholeBucket, chunks
from planner.model.options import gradient_dtype
from planner.model.tensor.row_exchange import Exchange, exchange_over
from planner.model.torch_private import copy_all

# Slices begin at multiples of so many elements. PyTorch computes the last few elements of a tensor
# one by one on a CPU, and others as vectors, with other roundings: with aligned slices each element
# is computed as in the whole tensor.
ALIGNMENT = 64


class Piece(NamedTuple):
    """Consecutive elements of one parameter, in the order of its memory, that belong to one
    replica.
    """

    parameter: int  # index in the bucket
    owner: int
    start: int  # of the parameter's elements
    stop: int
    row_start: int  # place of the first one in the owner's row

    @property
    def in_row(self) -> slice:
        return slice(self.row_start, self.row_start + self.stop - self.start)


def divide(
    sizes: Sequence[int], replicas: int, whole: Collection[int] = ()
) -> tuple[list[Piece], int]:
    """Divide parameters of `sizes` elements into rows of equal length; those of `whole`, by index,
    have one owner each.

    Returns:
        The pieces, and the elements of a row, with gaps that align each parameter and fill a row
        up.
    """
    starts = []
    total = 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT

    bounds = _bounds(starts, total, replicas, whole)
    pieces = []
    for index, (first, size) in enumerate(zip(starts, sizes, strict=True)):
        for owner, (begin, end) in enumerate(pairwise(bounds)):
            start = max(first, begin)
            stop = min(first + size, end)
            if start < stop:
                pieces.append(Piece(index, owner, start - first, stop - first, start - begin))

    return pieces, max(end - begin for begin, end in pairwise(bounds))


def _bounds(starts: Sequence[int], total: int, replicas: int, whole: Collection[int]) -> list[int]:
    """Return where the rows of the replicas begin, and the last one ends: at equal distances, but
    not within a parameter of `whole`.
    """
    even = -(-total // (replicas * ALIGNMENT)) * ALIGNMENT
    bounds = [min(owner * even, total) for owner in range(replicas + 1)]
    for index in whole:
        first = starts[index]
        last = (*starts[1:], total)[index]
        for owner, bound in enumerate(bounds):
            if first < bound < last:
                bounds[owner] = first if bound - first < last - bound else last

    return bounds


def elements(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` as one dimension, in the order of memory of `like`; a view, if `tensor` has
    that order, too.
    """
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass(eq=False)
class Shard:
    """The part of a parameter that this replica updates."""

    parameter: nn.Parameter
    start: int  # of its elements, in the order of its memory
    stop: int
    # all of its elements, which the optimizer sees in the parameter's shape, and else in one
    # dimension
    whole: bool
    # what the optimizer steps, wherever the parameter's `data` is
    stepped: nn.Parameter = field(init=False)

    def __post_init__(self) -> None:
        self.stepped = nn.Parameter(
            self.cut_from(self.parameter.data).to(gradient_dtype(self.parameter))
        )

    @property
    def is_master(self) -> bool:
        """Whether what is stepped is a copy in float32 of a weight in half precision."""
        return self.stepped.dtype != self.parameter.dtype

    @property
    def order(self) -> tuple[int, ...]:
        """The parameter's dimensions from the outermost in memory to the innermost."""
        strides = self.parameter.stride()
        return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))

    def cut_from(self, whole: Tensor) -> Tensor:
        """Return the shard of a whole tensor like the parameter."""
        return self.laid_out(elements(whole, self.parameter)[self.start : self.stop])

    def laid_out(self, part: Tensor) -> Tensor:
        """Return this part's elements, in one dimension, as the optimizer sees them."""
        if not self.whole:
            return part
        return part.as_strided(self.parameter.shape, self.parameter.stride())


def divided(state: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """Return an optimizer's state of a whole parameter for a shard; raise ModelFileError where it
    is indivisible.
    """
    found = dict(state)
    if shard.whole and not shard.is_master:
        return found
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
            found[key] = shard.cut_from(value).to(shard.stepped, copy=True)
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise ModelFileError(
                f"the optimizer keeps for a parameter of shape {tuple(shard.parameter.shape)} a "
                f"tensor '{key}' of "
                f"shape {tuple(value.shape)}, which its stage's replicas cannot shard",
                hint="solve again with `shard_optimizer=never`",
            )

    return found


class DividedBucket(Bucket):
    """A bucket of which each replica has the averages of its own row alone, as gradients of its
    shards.

    A row ends with how many replicas had a gradient of each parameter. The rows then take the
    weights.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        replica: tuple[int, int],
        wire: torch.device,
        whole: Collection[nn.Parameter] = (),
    ) -> None:
        super().__init__(parameters)
        own, replicas = replica
        self.pieces, self._elements = _divided(parameters, replicas, whole)
        self.shards = {
            piece: Shard(
                parameters[piece.parameter],
                piece.start,
                piece.stop,
                parameters[piece.parameter] in whole,
            )
            for piece in self.pieces
            if piece.owner == own
        }
        self._shape = replicas, self._elements + len(parameters)
        self._wire = wire
        self.exchange: Exchange  # with the other replicas; set when they have connected
        self._rows: Tensor | None = None  # from the first gradients to the end of the update
        self._wait: Callable[[], object]  # for the sums of the rows

    def _reduce(self, gradients: Mapping[int, Tensor], group: dist.ProcessGroup) -> None:
        # Gaps and missing gradients must be numbers like others.
        self._rows = torch.zeros(
            self._shape, dtype=gradient_dtype(self.parameters[0]), device=self._wire
        )
        flat = {
            index: elements(gradient, self.parameters[index])
            for index, gradient in gradients.items()
        }
        pieces = [piece for piece in self.pieces if piece.parameter in flat]
        copy_all(
            self._views(pieces),
            [flat[piece.parameter][piece.start : piece.stop] for piece in pieces],
        )
        self._rows[:, self._elements :] = 1
        for index in self._missing:
            self._rows[:, self._elements + index] = 0
        self._wait = self.exchange.reduce_scatter(self._rows)

    def _sums(self) -> tuple[Tensor, Tensor]:
        assert self._rows is not None
        self._wait()
        del self._wait  # with what has come
        own = self._rows[self.exchange.own]
        return own[: self._elements], own[self._elements :]

    def _give(self, sums: Tensor, indices: Sequence[int]) -> None:
        for piece, shard in self.shards.items():
            if piece.parameter in indices:
                shard.stepped.grad = shard.laid_out(sums[piece.in_row].to(shard.stepped.device))

    def post_weights(self) -> Callable[[], object]:
        """Begin to give all replicas this one's new weights, and return what waits for theirs;
        gradients are lost.
        """
        if self._rows is None:  # the gradients were summed elsewhere
            self._rows = torch.empty(
                self._shape, dtype=gradient_dtype(self.parameters[0]), device=self._wire
            )
        stepped = [shard.stepped.data for shard in self.shards.values()]
        copy_all(self._views(self.shards), [elements(weights, weights) for weights in stepped])
        return self.exchange.all_gather(self._rows)

    def store_weights(self) -> None:
        """Put the others' new weights, which have come, into the parameters."""
        pieces = [piece for piece in self.pieces if piece not in self.shards]
        weights = [elements(parameter.data, parameter) for parameter in self.parameters]
        copy_all(
            [weights[piece.parameter][piece.start : piece.stop] for piece in pieces],
            self._views(pieces),
        )
        self._rows = None

    def _views(self, pieces: Collection[Piece]) -> list[Tensor]:
        assert self._rows is not None
        return [self._rows[piece.owner, piece.in_row] for piece in pieces]


class Sharding:
    """One replica's share of its stage's optimizer.

    Args:
        replica: this one's number, and how many there are.
        shared: parameters that other stages hold, too: replicas need the whole gradients, to add
            them to the others'.
    """

    divides = True  # whether each replica has a part alone
    repeats = False  # whether a replica before this one has the same part

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        replica: tuple[int, int],
        shared: Collection[nn.Parameter],
        wire: torch.device,
    ) -> None:
        # one that has gaps in memory, or uses some twice, gets memory of its own
        for parameter in parameters:
            if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)

        self._shared = list(shared)
        self._alone = [parameter for parameter in parameters if parameter not in set(self._shared)]
        self._replica = replica
        self._wire = wire
        self.buckets: list[Bucket] = []  # what reduces the gradients of a round
        self._divided: list[DividedBucket] = []
        self.shards: dict[nn.Parameter, Shard] = {}
        # whole parameters of the optimizer's groups, on all replicas
        self.groups: list[list[nn.Parameter]] = []
        self._group: dist.ProcessGroup | None = None
        # Told what comes next, and whether that is to wait for the other replicas.
        self.note: Callable[[str, bool], object] = lambda activity, waits: None

    def divide(self, optimizer: Optimizer, whole: Collection[nn.Parameter] = ()) -> None:
        """Let `optimizer`, which has not stepped yet, step this replica's shards alone: of `whole`
        all or nothing.
        """
        apart, of_shared = (
            [
                DividedBucket(chunk, self._replica, self._wire, whole)
                for chunk in _filled(chunks(parameters), self._replica[1], whole)
            ]
            for parameters in (self._alone, self._shared)
        )
        self._divided = apart + of_shared
        self.buckets = [*apart, *map(WholeBucket, chunks(self._shared))]
        self.shards = {
            shard.parameter: shard for bucket in self._divided for shard in bucket.shards.values()
        }
        self.step_shards(optimizer, {})

    def step_shards(self, optimizer: Optimizer, now: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let `optimizer` step the shards of its parameters, or of what is `now` in their place."""
        for group in optimizer.param_groups:
            before: list[nn.Parameter] = group["params"]
            wholes = [now.get(parameter, parameter) for parameter in before]
            self.groups.append(wholes)

            own = [index for index, parameter in enumerate(wholes) if parameter in self.shards]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][index] for index in own]
            group["params"] = [self.shards[wholes[index]].stepped for index in own]

            # Adagrad has state before its first step
            for parameter, whole in zip(before, wholes, strict=True):
                state = optimizer.state.pop(parameter, None)
                if state and whole in self.shards:
                    shard = self.shards[whole]
                    optimizer.state[shard.stepped] = divided(state, shard)

    @property
    def has_own_part(self) -> bool:
        """Whether this replica has a part that none before it has."""
        return self.divides and not self.repeats

    def connect(self, group: dist.ProcessGroup) -> None:
        """Use this group of replicas for all exchanges."""
        self._group = group
        exchange = exchange_over(group)
        for bucket in self._divided:
            bucket.exchange = exchange

    def begin_backward(self, *, last: bool) -> None:
        """Prepare for a backward, which may be the `last` one before an update."""

    def part_with_weights(self) -> None:
        """Leave no weights gathered, as forwards without a backward may."""

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of all replicas' `value`, a number."""
        total = value.clone()
        self.note("waiting for its replicas' norm", True)
        dist.all_reduce(total, group=self._group)
        self.note("updating its weights", False)
        return total

    def take_gradients(self) -> None:
        """Give shards their part of gradients that are whole: those of shared weights."""
        for shard in self.shards.values():
            if shard.parameter.grad is not None:
                shard.stepped.grad = shard.cut_from(shard.parameter.grad)
                shard.parameter.grad = None

    def update(self, step: Callable[[], object]) -> None:
        """Run `step` on the shards where the parameters are now, then exchange the weights;
        gradients are lost.
        """
        masters = [shard for shard in self.shards.values() if shard.is_master]
        for shard in self.shards.values():
            if not shard.is_master:
                shard.stepped.data = shard.cut_from(shard.parameter.data)

        step()
        halves = [shard.cut_from(shard.parameter.data) for shard in masters]
        copy_all(halves, [shard.stepped.data for shard in masters])
        if not self.divides:
            return
        self.note("waiting for its replicas' weights", True)
        # All are posted before any is waited for: the next bucket is on its way while this one is
        # copied.
        under_way = [(bucket, bucket.post_weights()) for bucket in self._divided]
        for bucket, wait in under_way:
            wait()
            bucket.store_weights()

        self.note("finishing its update", False)


class Masters(Sharding):
    """Copies in float32 of a stage's weights in half precision, which the optimizer steps; each
    replica has all.
    """

    divides = False

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, (0, 1), (), torch.device("cpu"))

    def divide(self, optimizer: Optimizer, whole: Collection[nn.Parameter] = ()) -> None:
        """See base class."""
        self.buckets = [*map(WholeBucket, chunks(self._alone))]
        self.shards = {each: Shard(each, 0, each.numel(), whole=True) for each in self._alone}
        self.step_shards(optimizer, {})


def _divided(
    parameters: Sequence[nn.Parameter], replicas: int, whole: Collection[nn.Parameter]
) -> tuple[list[Piece], int]:
    indices = [index for index, parameter in enumerate(parameters) if parameter in whole]
    return divide([parameter.numel() for parameter in parameters], replicas, indices)


# Where parameters stay whole, rows are as long as the longest. A bucket takes more parameters until
# all rows together are no longer than this many times its elements: what is beyond is sent for
# nothing.
LONGEST = 1.25


def _filled(
    found: Sequence[list[nn.Parameter]], replicas: int, whole: Collection[nn.Parameter]
) -> Iterator[list[nn.Parameter]]:
    """Yield the chunks, joined where parameters that stay whole would make rows of unlike
    length.
    """
    together: list[nn.Parameter] = []
    for chunk, following in zip_longest(found, found[1:]):
        together += chunk
        row = _divided(together, replicas, whole)[1]
        long = (
            row * replicas
            > LONGEST * sum(parameter.numel() for parameter in together) + replicas * ALIGNMENT
        )
        if not (long and whole and following and following[0].dtype == chunk[0].dtype):
            yield together
            together = []
