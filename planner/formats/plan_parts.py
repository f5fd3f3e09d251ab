"""The parts of a plan: its stages with their memory, what they exchange, what to expect, and how it
was found.
"""

import re
from itertools import groupby, zip_longest
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from planner.errors import InputError
from planner.formats.files import GrownRecord, Record, replace
from planner.formats.profile import Shares, VaryingLengths
from planner.formats.quantities import (
    Bytes,
    BytesPerSecond,
    NonNegativeFloat,
    Number,
    Parts,
    PositiveFloat,
    Rank,
    Seconds,
    Workers,
)
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import NAMES, find
from planner.schedule.schedule import Schedule
from planner.stages.recomputation import RecomputedLayers, why_no_groups
from planner.stages.sharding import ShardedReplicas, Sharding, why_no_group
from planner.stages.tensor import RankGroups

PositiveInt = Annotated[int, Field(ge=1)]
LONGEST_CONFIG = 40  # characters of a config in tables and sentences


def config_of(replicas: tuple[int, ...], chunks: int = 1, degrees: tuple[int, ...] = ()) -> str:
    """Return PipeDream's notation, replicas per stage: (7, 1) is "7-1".

    "2x4-1x8" is two groups of four ranks, then one of eight. Where workers run several stages each,
    every worker counts once: (8, 8, 8, 8) with two chunks is "8-8 x2 chunks".
    """
    counts = zip_longest(
        replicas[: len(replicas) // chunks], degrees[: len(replicas) // chunks], fillvalue=1
    )
    once = "-".join(f"{r}x{t}" if t > 1 else str(r) for r, t in counts)
    if chunks > 1:
        return f"{once} x{chunks} chunks"
    return once


def short_config(config: str, longest: int = LONGEST_CONFIG) -> str:
    """Shorten a long config to its runs: "1, 13 x 2, 6 x 1 (20 stages)", or to its ends: "1-2-...-1
    (56 stages)".

    Chunks of one worker count as one stage.
    """
    if len(config) <= longest:
        return config
    once, _, chunks = config.partition(" ")
    parts = once.split("-")
    counted = [
        (part, len(list(run)))
        for part, run in groupby(f"({part})" if "x" in part else part for part in parts)
    ]
    runs = ", ".join(part if count == 1 else f"{count} x {part}" for part, count in counted)
    if (
        len(shown := " ".join(word for word in (runs, chunks, f"({len(parts)} stages)") if word))
        <= longest
    ):
        return shown

    tail = " ".join(word for word in (f"...-{parts[-1]}", chunks, f"({len(parts)} stages)") if word)
    return once[: once.rindex("-", 0, longest - len(tail)) + 1] + tail


def config_words(config: str, context: int = 1) -> str:
    """Return a config for people: that of a single stage in their words, "DP=8", "TP=4" or "DP=2
    TP=4"; "TP=2 CP=4" where `context` ranks of a replica divide sequences.
    """
    if not re.fullmatch(r"\d+(x\d+)?", config) or config == "1":
        return short_config(config)
    replicas, _, degree = config.partition("x")
    parts = [f"DP={replicas}"] if replicas != "1" else []
    dividing_layers = int(degree or 1) // context
    parts += [f"TP={dividing_layers}"] if dividing_layers > 1 else []
    parts += [f"CP={context}"] if context > 1 else []
    return " ".join(parts)


def _schedule(value: object) -> Schedule:
    if value == "naive":  # of older plans, whose minibatches were one microbatch each
        return FLUSH
    try:
        return find(value if isinstance(value, Schedule) else str(value))
    except InputError as error:  # pydantic adds the name of the field to a ValueError only
        raise ValueError(
            f"{error.message}: {', '.join(NAMES)} are known, "
            f"and those of a file that `schedule_from` names"
        ) from None


# In files, the schedule's name.
ScheduleField = Annotated[
    Schedule,
    PlainValidator(_schedule),
    PlainSerializer(lambda schedule: schedule.name, return_type=str),
    WithJsonSchema({"enum": list(NAMES)}),
]


class StageMemory(GrownRecord):
    """Peak memory of one replica of a stage, by use."""

    weights_bytes: Bytes  # all weight versions
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    buffers_bytes: Bytes
    activations_bytes: Bytes  # saved for backward, over all minibatches in flight
    communication_bytes: Bytes
    overhead_bytes: Bytes = 0  # on CUDA: context, communicators, fragmentation

    later_fields: ClassVar[frozenset[str]] = frozenset({"overhead_bytes"})

    @property
    def total_bytes(self) -> int:
        return sum(self.model_dump().values())

    @property
    def tensor_bytes(self) -> int:
        """What the allocator counts."""
        return self.total_bytes - self.overhead_bytes


class Exchanged(Record):
    """What each rank of a group sends to the others for a microbatch, over a link that messages
    cross, too.
    """

    forward_bytes: NonNegativeFloat
    backward_bytes: NonNegativeFloat
    bytes_per_s: BytesPerSecond  # while nothing else crosses the link


class Stage(GrownRecord, ShardedReplicas, RankGroups, RecomputedLayers):
    """Consecutive layers, replicated on `ranks`; minibatch b runs on `ranks[b % replicas]`, or that
    group.
    """

    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1)]
    tensor: Workers = 1  # ranks of a replica, which divide every layer between them
    in_flight: Parts  # minibatches (microbatches) in flight per replica, at most
    sharded: bool = False  # the replicas divide the optimizer's state, and each updates its part
    # of a plan's only stage: 2 gradients, too, 3 weights, too
    sharding_level: Annotated[int, Field(ge=1, le=3)] = 1
    # At these two levels, replicas that divide between them, where other groups repeat the same;
    # None: all of them.
    shard_group: Annotated[int, Field(ge=2)] | None = None
    # Groups of layers that keep only the values which enter them, and run their forward again
    # before their own backward; true: the whole stage is one group.
    recompute: bool | tuple[tuple[str, ...], ...] = False
    # of that forward, per microbatch; None: of the whole stage's if that recomputes
    recompute_s: Seconds | None = None
    forward_s: Seconds  # of one microbatch on one replica
    backward_s: Seconds
    update_s: Seconds  # of its part of the weights, where the optimizer's state is divided
    # gradient accumulation, in every backward of a minibatch except the first
    accumulate_s: Seconds = 0.0
    # Of `backward_s`, for the gradients of weights, under schedules that may compute them later;
    # None: half of it.
    weights_s: Seconds | None = None
    # from the start of a backward until each part of the gradients is complete
    ready_s: tuple[Seconds, ...] = ()
    # of their bytes in each part; equal ones if empty
    ready_shares: tuple[NonNegativeFloat, ...] = ()
    # Where lengths vary, seconds are means over the plan's microbatches; a microbatch takes its
    # shares of them.
    forward_shares: Shares = ()
    backward_shares: Shares = ()
    # within the seconds above; None: on links of the group's own, or nothing
    exchanged: Exchanged | None = None
    memory: StageMemory
    # of the host's memory, for each of the ranks: masters and states that are offloaded to it
    host_bytes: Bytes = 0

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "sharded",
            "sharding_level",
            "recompute_s",
            "ready_shares",
            "tensor",
            "forward_shares",
            "backward_shares",
        }
        | {"exchanged", "shard_group", "weights_s", "host_bytes"}
    )

    @property
    def replicas(self) -> int:
        return len(self.ranks) // self.ranks_per_replica

    @property
    def level(self) -> int:
        """What the replicas divide, as `planner.stages.sharding` numbers it; 0 for nothing."""
        if self.sharded:
            return self.sharding_level
        return 0

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.level, self.shard_group or 0)

    @property
    def again_s(self) -> float:
        """Seconds of the forward that is run again before each backward."""
        if self.recompute_s is not None:
            return self.recompute_s
        if self.recomputes_as_a_whole:
            return self.forward_s
        return 0.0

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.again_s + self.backward_s + self.update_s

    @property
    def late_s(self) -> float:
        """Seconds of `again_s` that replicas spend when some gradients are there already; `ready_s`
        has them.
        """
        partly = self.ready_s and not isinstance(self.recompute, bool)
        if not partly:
            return 0.0
        return max(0.0, self.ready_s[-1] - self.backward_s)

    @model_validator(mode="after")
    def _check_options(self) -> "Stage":
        if self.ranks != tuple(
            first + place for first in self.leaders for place in range(self.tensor)
        ):
            raise ValueError(
                f"the ranks {list(self.ranks)} are no groups of {self.tensor} consecutive ones"
            )

        if self.sharded and self.replicas == 1:
            raise ValueError("only a stage of two replicas or more is sharded")
        problem = why_no_group(self.sharding, self.replicas)
        if problem is not None:
            raise ValueError(f"shard_group {self.shard_group}: {problem}")
        if self.ready_shares and len(self.ready_shares) != len(self.ready_s):
            times = len(self.ready_s)
            shares = len(self.ready_shares)
            raise ValueError(
                f"ready_s has {times} parts of the gradients, and ready_shares {shares}"
            )

        if isinstance(self.recompute, bool):
            return self
        problem = why_no_groups(self.recompute, self.layers)
        if problem is not None:
            raise ValueError(problem)
        if self.recompute_s is None:
            raise ValueError("recompute_s is missing: only of a whole stage is it known")
        return self


class Transfer(GrownRecord):
    """Values that stage `source` sends to stage `target` for every microbatch; gradients return the
    same way.

    A value that several later stages use travels along them: each user passes it on to the next,
    and gradients add up on the way back. Bytes are those on the link, where the cluster's
    `compress` codes what travels; where lengths vary, they are means over the plan's microbatches.
    """

    later_fields: ClassVar[frozenset[str]] = frozenset({"shares"})

    source: Number
    target: Number
    values: Annotated[tuple[str, ...], Field(min_length=1)]
    output_bytes: Bytes
    gradient_bytes: Bytes
    shares: Shares = ()  # of these bytes that a microbatch has


class PlannedLengths(VaryingLengths):
    """The lengths that a plan was made for."""

    microbatches: tuple[tuple[int, ...], ...]  # the lengths of some, in an order of training

    @property
    def means(self) -> tuple[float, ...]:
        """Return the mean of each length over microbatches."""
        return tuple(sum(column) / len(column) for column in zip(*self.microbatches, strict=True))


class Shared(Record):
    """Weights that two stages share: each has a copy, and they exchange its gradients."""

    stages: tuple[Number, Number]
    weights: Annotated[tuple[str, ...], Field(min_length=1)]
    # an upper bound: profiles know the bytes of layers, not of single weights
    gradient_bytes: Bytes


class Bottleneck(Record):
    """The resource that limits the pipeline."""

    stage: Number
    # shared_link: the link of the server that holds most of the stage; boundary: the cut after it,
    # in older plans alone
    resource: Literal["compute", "link", "shared_link", "boundary"]
    busy_s: Seconds  # per minibatch


class Prediction(GrownRecord):
    """What to expect of the plan in steady state."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"speed_interval"})

    seconds_per_minibatch: PositiveFloat
    by: Literal["simulation", "cost model"] = "cost model"  # if it is too slow to simulate
    samples_per_s: PositiveFloat | None  # None if the profile does not know its batch size
    bottleneck: Bottleneck
    speedup_over_one_gpu: float
    speedup_over_data_parallel: float
    communication_bytes_per_sample: float | None
    data_parallel_communication_bytes_per_sample: float | None
    communication_cut: float | None = None  # share of data parallelism's bytes that the plan avoids
    tokens_per_s: PositiveFloat | None = None  # None where the model is not of token ids
    flop_utilisation: PositiveFloat | None = None  # of the workers' peak, by the model's own FLOPs
    # Of an estimate: speeds relative to the predicted one, between which most measured runs of its
    # kind were (`planner.plan.confidence`).
    speed_interval: tuple[PositiveFloat, PositiveFloat] | None = None


class OtherWay(GrownRecord):
    """Another way to train the model on the cluster, to compare the plan with."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"staleness", "samples_per_update"})

    name: str
    config: str
    schedule: ScheduleField
    microbatches: Parts  # per minibatch
    # At the stage of the fewest and at that of the most, which differ under 1f1b alone;
    # microbatches where their size is not known. None in files of older versions.
    samples_per_update: tuple[PositiveInt, PositiveInt] | None = None
    seconds_per_microbatch: Seconds
    memory_bytes: Bytes  # of the GPU that needs most
    over_memory_bytes: Bytes = 0  # by how much that exceeds the memory; 0 if it fits
    staleness: Number = 0  # updates that the gradients are late


class SteadyPlan(Record):
    """A plan that is faster on slow links, beside the plan of an answer."""

    config: str
    recomputes: bool
    shards: bool  # the replicas of some stage divide what they store
    speedup: PositiveFloat  # times as fast as the plan, on the slow links
    # at most, of its speed, against the fastest plan at any of the rates that were tried
    loss: NonNegativeFloat


class SlowLinks(Record):
    """What the plan comes to where the links of a level are slower than their data sheet says."""

    place: Number  # of the level, in the cluster
    bytes_per_s: BytesPerSecond  # of a member's slow link there
    slowdown: PositiveFloat  # times as long as the plan takes there
    loss: NonNegativeFloat  # as for `SteadyPlan`
    fastest: SteadyPlan | None = None  # on the slow links; None where the plan is
    # what loses least over all rates from the slow one to the data sheet's; None where the plan
    # does
    steadiest: SteadyPlan | None = None
    # whether other plans were searched for as long as it takes
    complete: bool = True


class AskedRules(Record):
    """What the user asked the stages of a plan to be like, as in the options of `plan solve`."""

    recompute: Literal["auto", "never", "always", "blocks"] = "auto"
    shard_optimizer: Literal["auto", "never", "always"] = "auto"
    max_stages: int | None = None
    max_staleness: int | None = None
    granularity: Literal["auto", "block", "layer"] = "auto"


# the first layers before each cut: what a search may be limited to
ALONG_ORDER = "cuts along the profile's order"


class SolverReport(GrownRecord):
    """How the plan was found, and how far from optimal it can be."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"depth", "bound_of", "rules", "cuts"})

    name: str
    # the others are in older plans alone
    cost_model: Literal["resource", "pipedream", "paper"] = "resource"
    status: Literal["optimal", "feasible"]
    lower_bound_s: Seconds  # per minibatch: no plan is faster by the cost model
    bound_of: str = ""  # of which plans: "cuts between blocks"; where empty, of all
    # which were searched, of a graph that has others than those along the profile's order
    cuts: str = ""
    gap: NonNegativeFloat  # (seconds_per_minibatch - lower_bound_s) / seconds_per_minibatch
    seconds: Seconds
    cost_model_s: Seconds | None = None  # per minibatch: this plan by the cost model
    simulated: Number = 0  # number of candidates that were simulated
    exhausted: bool = True  # all candidates were simulated that could be faster by the cost model
    depth: Literal["auto", "published"] = "auto"  # how many units in flight stages were given
    rules: AskedRules | None = None  # where the user asked for some

    def for_time(
        self, seconds: float, cost_model_s: float | None, optimal_gap: float
    ) -> "SolverReport":
        """Return the report for a plan that takes another time, which no bound is above.

        Args:
            seconds: per minibatch.
            cost_model_s: the same, by the cost model.
            optimal_gap: above which no plan is optimal.
        """
        bound_s = min(self.lower_bound_s, seconds)
        gap = (seconds - bound_s) / seconds
        return replace(
            self,
            status=self.status if gap <= optimal_gap else "feasible",
            lower_bound_s=bound_s,
            gap=gap,
            cost_model_s=cost_model_s,
        )
