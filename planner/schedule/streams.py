"""Pure generators: a pipeline's shape and a schedule's name -> one stream of instructions per worker.

The schedules differ in two numbers only, the units between two updates and the units in flight:

    schedule     units per round                 in flight on a replica of stage s
    1f1b         `accumulate` minibatches per r. d_s = ceil(sum_{t>=s} r_t / r_s)      (PipeDream, SOSP'19, 3.2)
    2bw          the minibatch's microbatches    d_s, at most m / r_s + 1              (PipeDream-2BW, ICML'21)
    1f1b-flush   the minibatch's microbatches    d_s                                   (PipeDream-Flush, ICML'21)
    gpipe        the minibatch's microbatches    all of them                           (GPipe, NeurIPS'19)
    zb-h1        the minibatch's microbatches    d_0 at most                           (Zero bubble, ICLR'24)
    interleaved  the minibatch's microbatches    see `planner.schedule.interleaved`     (Megatron-LM, SC'21)
    naive        one                             1

Under zb-h1 backwards are in two parts, and a unit is in flight until its second part is done: the later a stage, the
longer that waits, so that all stages hold what the first one does and the gradients of weights fill the bubble.
Under interleaved a worker has several stages, and one stream for all of them; elsewhere it has one.
1f1b and 2bw never drain the pipeline. Under 1f1b a forward uses the newest weights, or with vertical
sync those that the first stage's had (see `planner.schedule.vertical_sync`); under 2bw the forward of minibatch t uses
those that minibatch t - 2 left, whatever is there since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.schedule.instructions import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Unit,
    Update,
)
from planner.schedule.interleaved import chunks_in_flight, interleave
from planner.schedule.shared import add_shared, lag, send_shared, sharers
from planner.schedule.vertical_sync import Entry, versions_held


@dataclass(frozen=True)
class Channel:
    """Stage `source` sends activations to the later stage `target`; `gradient`: and gets gradients back."""

    source: int
    target: int
    gradient: bool = True


@dataclass(frozen=True)
class PipelineShape:
    """All that a schedule needs to know of a plan.

    Args:
        ranks: per stage, the ranks of its replicas.
        channels: the pairs of stages that exchange values.
        schedule: "1f1b", "2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved" or "naive".
        microbatches: per minibatch; 1 for "1f1b" and "naive".
        depths: per stage, the most units between forward and backward on one replica; None for the schedule's own.
        vertical_sync: under "1f1b", a minibatch uses the same version of the weights at every stage.
        shared: pairs of stages that hold the same weights (see `planner.schedule.shared`).
        accumulate: minibatches per replica between two updates of "1f1b"; the others divide minibatches for that.
    """

    ranks: tuple[tuple[int, ...], ...]
    channels: tuple[Channel, ...]
    schedule: str
    microbatches: int = 1
    depths: tuple[int, ...] | None = None
    vertical_sync: bool = False
    accumulate: int = 1
    shared: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.schedule not in ("1f1b", "2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved", "naive"):
            raise ValueError(f"unknown schedule '{self.schedule}'")
        if self.schedule != "1f1b" and self.accumulate != 1:
            raise ValueError(f"schedule '{self.schedule}' accumulates over microbatches, not over minibatches")
        if self.schedule in ("1f1b", "naive") and self.microbatches != 1:
            raise ValueError(f"schedule '{self.schedule}' has one microbatch per minibatch, not {self.microbatches}")
        if self.vertical_sync and self.accumulate != 1:
            raise ValueError("vertical sync counts versions by rounds of one minibatch per replica")
        if self.vertical_sync and self.shared:
            raise ValueError("with vertical sync shared weights would be at another version than the others")
        if self.vertical_sync and self.schedule != "1f1b":
            raise ValueError(f"vertical sync is for the schedule '1f1b', not '{self.schedule}'")

    @property
    def asynchronous(self) -> bool:
        """Whether a stage updates without draining the pipeline."""
        return self.schedule in ("1f1b", "2bw")

    @property
    def first_stages(self) -> dict[int, int]:
        """The first stage of every worker: its only one, except under interleaved."""
        return {rank: stage for stage, ranks in reversed(list(enumerate(self.ranks))) for rank in ranks}

    @property
    def pipeline_length(self) -> int:
        """Stages on workers of their own; those beyond are further chunks of the same workers, in the same order."""
        return len(set(self.ranks))

    @cached_property
    def _by_end(self) -> tuple[dict[int, tuple[Channel, ...]], dict[int, tuple[Channel, ...]]]:
        """The channels by their target and by their source: a pipeline of a thousand stages has as many."""
        by_target: dict[int, tuple[Channel, ...]] = {}
        by_source: dict[int, tuple[Channel, ...]] = {}
        for channel in self.channels:
            by_target[channel.target] = (*by_target.get(channel.target, ()), channel)
            by_source[channel.source] = (*by_source.get(channel.source, ()), channel)
        return by_target, by_source

    def arriving(self, stage: int) -> tuple[Channel, ...]:
        """The channels that activations of `stage` come by."""
        return self._by_end[0].get(stage, ())

    def leaving(self, stage: int) -> tuple[Channel, ...]:
        """The channels that activations of `stage` leave by."""
        return self._by_end[1].get(stage, ())

    def sharers(self, stage: int) -> tuple[int, ...]:
        """The stages that hold weights of `stage` too."""
        return sharers(self.shared, stage) if self.shared else ()

    def lag(self, stage: int) -> int:
        """Rounds by which gradients of shared weights are applied later than those of other weights."""
        if self.schedule != "1f1b" or not self.sharers(stage):
            return 0
        depths = [self.in_flight(other) for other in range(len(self.ranks))]
        return lag(self.shared, depths, self.accumulate, stage)

    def minibatches_per_update(self, stage: int) -> int:
        """Minibatches whose gradients one update of `stage` averages: a round."""
        return len(self.ranks[stage]) * self.accumulate if self.schedule == "1f1b" else 1

    def rank_of(self, stage: int, unit: Unit) -> int:
        """The worker that runs `unit` at `stage`: round-robin, the same for forward and backward (1F1B-RR)."""
        replicas = self.ranks[stage]
        turn = unit.minibatch if self.microbatches == 1 else unit.microbatch
        if self.schedule == "2bw":
            turn = unit.minibatch * self.microbatches + unit.microbatch  # in one row, as the depths count them
        return replicas[turn % len(replicas)]

    def splits(self, stage: int) -> bool:
        """Whether the stage's backwards are in two parts: under zb-h1, where an earlier stage waits for the first."""
        return self.schedule == "zb-h1" and any(channel.gradient for channel in self.arriving(stage))

    def in_flight(self, stage: int) -> int:
        """Most units between forward and backward on one replica of `stage`."""
        if self.depths is not None:
            return self.depths[stage]
        match self.schedule:
            case "naive":
                return 1
            case "gpipe":
                return -(-self.microbatches // len(self.ranks[stage]))
            case "interleaved":
                chunk, position = divmod(stage, self.pipeline_length)
                chunks = len(self.ranks) // self.pipeline_length
                replicas = len(self.ranks[stage])
                shares = {-(-self.microbatches // replicas), self.microbatches // replicas} - {0}
                return max(chunks_in_flight(self.pipeline_length, chunks, position, n)[chunk] for n in shares)
            case "zb-h1":
                depth = warm_up_depth([len(ranks) for ranks in self.ranks], stage)
                held = warm_up_depth([len(ranks) for ranks in self.ranks], 0) if self.splits(stage) else depth
                return min(-(-self.microbatches // len(self.ranks[stage])), max(held, depth))
            case "2bw":
                share = self.microbatches // len(self.ranks[stage])
                return min(share + 1, warm_up_depth([len(ranks) for ranks in self.ranks], stage))
            case _:
                return warm_up_depth([len(ranks) for ranks in self.ranks], stage)

    @cached_property
    def entry(self) -> Entry | None:
        """What decides the versions of all stages under vertical sync."""
        return Entry(len(self.ranks[0]), self.in_flight(0)) if self.vertical_sync else None

    def versions(self, stage: int) -> int:
        """Most versions of its weights that one replica of `stage` holds: what memory is planned for."""
        if self.entry is not None:
            return versions_held(self.entry, len(self.ranks[stage]))
        match self.schedule:
            case "1f1b":
                return self.in_flight(stage)
            case "2bw":
                return 2
            case _:
                return 1


def warm_up_depth(replicas: Sequence[int], stage: int) -> int:
    """d_s = ceil(sum_{t>=s} r_t / r_s): the minibatches a replica admits before its first backward.

    For stage 0 this is NOAM, the number of minibatches in flight per input replica (SOSP'19, section 3.2).
    """
    return -(-sum(replicas[stage:]) // replicas[stage])


def one_forward_one_backward(units: int, in_flight: int) -> Iterator[tuple[bool, int]]:
    """Order of the computations: `in_flight` forwards, then backward and forward in turn, then the rest.

    Yields (is it a forward, index of the unit): for 4 units and 2 in flight F0 F1 B0 F2 B1 F3 B2 B3.
    """
    for step in range(units + in_flight):
        if 0 <= step - in_flight < units:
            yield False, step - in_flight
        if step < units:
            yield True, step


def stream(shape: PipelineShape, stage: int, rank: int, minibatches: int) -> Iterator[Instruction]:
    """All instructions of the worker `rank` for `minibatches` minibatches, in the order it runs them.

    `stage` is one of the worker's. Yields lazily: a week of training costs no memory.
    """
    assert rank in shape.ranks[stage]
    match shape.schedule:
        case "1f1b":
            yield from _asynchronous(shape, stage, rank, minibatches)
        case "2bw":
            yield from _double_buffered(shape, stage, rank, minibatches)
        case "interleaved":
            for minibatch in range(minibatches):
                yield from _interleaved(shape, stage, rank, minibatch)
        case "zb-h1" if shape.splits(stage):
            for minibatch in range(minibatches):
                yield from _zero_bubble(shape, stage, rank, minibatch)
        case _:
            for minibatch in range(minibatches):
                yield from _synchronous(shape, stage, rank, minibatch)


def _asynchronous(shape: PipelineShape, stage: int, rank: int, minibatches: int) -> Iterator[Instruction]:
    replicas = shape.ranks[stage]
    per_round = shape.minibatches_per_update(stage)
    mine = range(replicas.index(rank), minibatches, len(replicas))
    for is_forward, index in one_forward_one_backward(len(mine), shape.in_flight(stage)):
        if is_forward:
            version = None if shape.entry is None else shape.entry.version(mine[index], len(replicas))
            yield from _forward(shape, stage, Unit(mine[index]), version)
        else:
            round_ = mine[index] // per_round
            last_of_round = index + 1 == len(mine) or mine[index + 1] // per_round > round_
            yield from _backward(shape, stage, Unit(mine[index]), last_of_round=last_of_round)
            if last_of_round:
                kept: tuple[int, ...] = ()
                if shape.entry is not None:
                    kept = shape.entry.to_come(mine[index + shape.in_flight(stage) :], len(replicas), round_ + 1)
                yield from _finish_round(shape, stage, rank, round_, minibatches, kept)
    # A last, partial round has no minibatch for this replica, but its weights must follow the others'.
    last_round = (minibatches - 1) // per_round
    if minibatches and (not mine or mine[-1] // per_round < last_round):
        yield from _finish_round(shape, stage, rank, last_round, minibatches)
    rounds, behind = -(-minibatches // per_round), shape.lag(stage)
    for number, round_ in enumerate(range(max(0, rounds - behind), rounds)):
        yield from add_shared(shape.ranks, shape.sharers(stage), stage, rank, round_)
        yield Update(stage, rounds + number)


def _double_buffered(shape: PipelineShape, stage: int, rank: int, minibatches: int) -> Iterator[Instruction]:
    """Microbatches of all minibatches in one row, with an update after the last backward of each minibatch."""
    replicas = shape.ranks[stage]
    assert len(replicas) <= shape.microbatches
    mine = range(replicas.index(rank), shape.microbatches * minibatches, len(replicas))
    for is_forward, index in one_forward_one_backward(len(mine), shape.in_flight(stage)):
        unit = Unit(*divmod(mine[index], shape.microbatches))
        if is_forward:
            yield from _forward(shape, stage, unit, max(0, unit.minibatch - 1))
        else:
            last = unit.microbatch + len(replicas) >= shape.microbatches
            yield from _backward(shape, stage, unit, last_of_round=last)
            if last:
                # What is left of the next minibatch runs at the version that this update replaces.
                ahead = index + shape.in_flight(stage)
                more = ahead < len(mine) and mine[ahead] // shape.microbatches == unit.minibatch + 1
                kept = (unit.minibatch,) if more else ()
                yield from _finish_minibatch(shape, [stage], rank, unit.minibatch, kept)


def _finish_minibatch(
    shape: PipelineShape, stages: Sequence[int], rank: int, minibatch: int, kept: tuple[int, ...] = ()
) -> Iterator[Instruction]:
    """Losses are scaled to sum to the minibatch's: no division here."""
    for stage in stages:
        if len(shape.ranks[stage]) > 1:
            yield AllReduce(stage, minibatch, divisor=1)
        yield from send_shared(shape.ranks, shape.sharers(stage), stage, rank, minibatch)
    for stage in stages:
        yield from add_shared(shape.ranks, shape.sharers(stage), stage, rank, minibatch)
        yield Update(stage, minibatch, kept)


def _finish_round(
    shape: PipelineShape, stage: int, rank: int, round_: int, minibatches: int, kept: tuple[int, ...] = ()
) -> Iterator[Instruction]:
    per_round = shape.minibatches_per_update(stage)
    if per_round > 1:
        yield AllReduce(stage, round_, divisor=min(per_round, minibatches - round_ * per_round))
    if peers := shape.sharers(stage):
        yield from send_shared(shape.ranks, peers, stage, rank, round_)
        if round_ >= shape.lag(stage):
            yield from add_shared(shape.ranks, peers, stage, rank, round_ - shape.lag(stage))
    yield Update(stage, round_, kept)


def _synchronous(shape: PipelineShape, stage: int, rank: int, minibatch: int) -> Iterator[Instruction]:
    """One minibatch with a flush at its end."""
    units = [Unit(minibatch, microbatch) for microbatch in range(shape.microbatches)]
    mine = [unit for unit in units if shape.rank_of(stage, unit) == rank]
    for is_forward, index in one_forward_one_backward(len(mine), shape.in_flight(stage)):
        if is_forward:
            yield from _forward(shape, stage, mine[index])
        else:
            yield from _backward(shape, stage, mine[index], last_of_round=index == len(mine) - 1)
    yield from _finish_minibatch(shape, [stage], rank, minibatch)


def _zero_bubble(shape: PipelineShape, stage: int, rank: int, minibatch: int) -> Iterator[Instruction]:
    """As 1f1b-flush, but the gradients of weights come some backwards after those that other stages wait for.

    That matters where the pipeline fills and where it drains. In between all workers are busy, and a backward in one
    part computes less: it finds what it needs in the cache.
    """
    units = [Unit(minibatch, microbatch) for microbatch in range(shape.microbatches)]
    mine = [unit for unit in units if shape.rank_of(stage, unit) == rank]
    ahead = min(shape.in_flight(stage), warm_up_depth([len(ranks) for ranks in shape.ranks], stage))
    behind = shape.in_flight(stage) - ahead
    draining = max(1, shape.in_flight(stage) - 1)
    waiting: deque[Unit] = deque()
    for is_forward, index in one_forward_one_backward(len(mine), ahead):
        if is_forward:
            yield from _forward(shape, stage, mine[index])
        elif behind <= index < len(mine) - draining:
            yield from _backward(shape, stage, mine[index], last_of_round=False)
        else:
            yield from _backward(shape, stage, mine[index], last_of_round=False, split=True)
            waiting.append(mine[index])
            if len(waiting) > behind:
                yield BackwardWeight(stage, waiting.popleft(), last_of_round=index == len(mine) - 1 and not waiting)
    while waiting:
        yield BackwardWeight(stage, waiting.popleft(), last_of_round=not waiting)
    yield from _finish_minibatch(shape, [stage], rank, minibatch)


def _interleaved(shape: PipelineShape, stage: int, rank: int, minibatch: int) -> Iterator[Instruction]:
    """One minibatch on all stages of the worker, with a flush at its end."""
    workers = shape.pipeline_length
    own = range(stage % workers, len(shape.ranks), workers)
    units = [Unit(minibatch, microbatch) for microbatch in range(shape.microbatches)]
    mine = [unit for unit in units if shape.rank_of(stage, unit) == rank]
    for is_forward, chunk, index in interleave(workers, len(own), own[0], len(mine)):
        if is_forward:
            yield from _forward(shape, own[chunk], mine[index])
        else:
            yield from _backward(shape, own[chunk], mine[index], last_of_round=index == len(mine) - 1)
    # In the order in which their gradients are complete.
    yield from _finish_minibatch(shape, own[::-1], rank, minibatch)


def _forward(shape: PipelineShape, stage: int, unit: Unit, version: int | None = None) -> Iterator[Instruction]:
    for channel in shape.arriving(stage):
        yield ReceiveActivation(stage, unit, channel.source, shape.rank_of(channel.source, unit))
    yield Forward(stage, unit, version)
    for channel in shape.leaving(stage):
        yield SendActivation(stage, unit, channel.target, shape.rank_of(channel.target, unit))


def _backward(
    shape: PipelineShape, stage: int, unit: Unit, *, last_of_round: bool, split: bool = False
) -> Iterator[Instruction]:
    for channel in shape.leaving(stage):
        if channel.gradient:
            yield ReceiveGradient(stage, unit, channel.target, shape.rank_of(channel.target, unit))
    yield BackwardInput(stage, unit) if split else Backward(stage, unit, last_of_round)
    for channel in shape.arriving(stage):
        if channel.gradient:
            yield SendGradient(stage, unit, channel.source, shape.rank_of(channel.source, unit))
