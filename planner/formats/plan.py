"""The Plan: which layers form which stage, on which ranks, under which schedule, and what to expect of it.

`plan solve` writes it, `plan train` runs it. What makes a plan valid is checked here, whoever made the plan.
"""

from __future__ import annotations

from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from planner.errors import InputError, PlanError
from planner.formats.cluster import Cluster
from planner.formats.cost_model_names import CostModelName
from planner.formats.files import AlwaysTrue, GrownRecord, Record, load_record, refuse_max_load, save_record
from planner.formats.profile import Autocast, Bytes, Device, LossMean, MemoryFormat, Seconds
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.registry import NAMES, find
from planner.schedule.schedule import Schedule

REMEDY = "make a plan with: plan solve"
LONGEST_CONFIG = 40  # characters of a config in tables and sentences
GIVEN = "given"  # the solver's name in plans whose stages a person chose


def _schedule(value: object) -> Schedule:
    """Return the schedule that a file names."""
    try:
        return find(value if isinstance(value, Schedule) else str(value))
    except InputError as error:  # pydantic adds the name of the field to a ValueError only
        raise ValueError(f"{error.message}: {', '.join(NAMES)} are known") from None


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
        """Sum of the parts."""
        return sum(self.model_dump().values())

    @property
    def tensor_bytes(self) -> int:
        """Sum of the parts that are tensors, which the allocator counts."""
        return self.total_bytes - self.overhead_bytes


class Stage(GrownRecord):
    """Consecutive layers, replicated on `ranks`; minibatch b runs on `ranks[b % replicas]`, or that group."""

    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    ranks: Annotated[tuple[int, ...], Field(min_length=1)]
    tensor: Annotated[int, Field(ge=1)] = 1  # ranks of a replica, which divide every layer between them
    in_flight: Annotated[int, Field(ge=1)]  # minibatches (microbatches) in flight per replica, at most
    sharded: bool = False  # the replicas divide the optimizer's state, and each updates its part
    # Groups of layers that keep only the values which enter them, and run their forward again before their own
    # backward; true: the whole stage is one group.
    recompute: bool | tuple[tuple[str, ...], ...] = False
    recompute_s: Seconds | None = None  # of that forward, per microbatch; None: of the whole stage's if that recomputes
    forward_s: Seconds  # of one microbatch on one replica
    backward_s: Seconds
    update_s: Seconds  # of its part of the weights, where the optimizer's state is divided
    accumulate_s: Seconds = 0.0  # gradient accumulation, in every backward of a minibatch except the first
    ready_s: tuple[Seconds, ...] = ()  # from the start of a backward until each part of the gradients is complete
    ready_shares: tuple[
        Annotated[float, Field(ge=0)], ...
    ] = ()  # of the gradients' bytes in each part; equal ones where it is empty
    memory: StageMemory

    later_fields: ClassVar[frozenset[str]] = frozenset({"sharded", "recompute_s", "ready_shares", "tensor"})

    @property
    def replicas(self) -> int:
        """Number of workers that run this stage, or of groups of them."""
        return len(self.ranks) // self.tensor

    @property
    def recomputes(self) -> bool:
        """Whether any layers run their forward again."""
        return bool(self.recompute)

    @property
    def recompute_groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of layers that recompute, by their names."""
        if isinstance(self.recompute, bool):
            return (self.layers,) if self.recompute else ()
        return self.recompute

    @property
    def again_s(self) -> float:
        """Seconds of the forward that is run again before each backward."""
        if self.recompute_s is not None:
            return self.recompute_s
        return self.forward_s if self.recompute is True else 0.0

    @property
    def compute_s(self) -> float:
        """Time of one microbatch on one replica: forward, recomputation if any, backward and update."""
        return self.forward_s + self.again_s + self.backward_s + self.update_s

    @property
    def late_s(self) -> float:
        """Seconds of `again_s` that replicas spend when some gradients are there already; `ready_s` has them."""
        partly = self.ready_s and not isinstance(self.recompute, bool)
        return max(0.0, self.ready_s[-1] - self.backward_s) if partly else 0.0

    @model_validator(mode="after")
    def _check_options(self) -> Stage:
        if self.ranks != tuple(first + place for first in self.ranks[:: self.tensor] for place in range(self.tensor)):
            raise ValueError(f"the ranks {list(self.ranks)} are no groups of {self.tensor} consecutive ones")
        if self.sharded and self.replicas == 1:
            raise ValueError("only a stage of two replicas or more is sharded")
        if isinstance(self.recompute, bool):
            return self
        names = list(chain.from_iterable(self.recompute))
        if not self.recompute or not all(self.recompute) or len(set(names)) < len(names):
            raise ValueError("recompute lists groups of layers, each layer once at most")
        if unknown := set(names).difference(self.layers):
            raise ValueError(f"recompute names '{min(unknown)}', which is no layer of the stage")
        place = {name: number for number, name in enumerate(self.layers)}
        for group in self.recompute:
            if [place[name] for name in group] != list(range(place[group[0]], place[group[0]] + len(group))):
                raise ValueError(f"the recomputing group of '{group[0]}' is no run of consecutive layers of the stage")
        if self.recompute_s is None:
            raise ValueError("recompute_s is missing: only of a whole stage is it known")
        return self


class Transfer(Record):
    """Values that stage `source` sends to stage `target` for every microbatch; gradients return the same way.

    Bytes are those on the link, where the cluster's `compress` codes what travels.

    A value that several later stages use travels along them: each user passes it on to the next, and gradients add up
    on the way back. So what a stage sends depends only on its own layers, and no value crosses a link twice.
    """

    source: Annotated[int, Field(ge=0)]
    target: Annotated[int, Field(ge=0)]
    values: Annotated[tuple[str, ...], Field(min_length=1)]
    output_bytes: Bytes
    gradient_bytes: Bytes


class Shared(Record):
    """Weights that two stages share: each has a copy, and they exchange its gradients."""

    stages: tuple[int, int]
    weights: Annotated[tuple[str, ...], Field(min_length=1)]
    gradient_bytes: Bytes  # an upper bound: profiles know the bytes of layers, not of single weights


class Bottleneck(Record):
    """The resource that limits the pipeline."""

    stage: int
    # shared_link: the link of the server that holds most of the stage; boundary: the cut after the stage, in published
    # cost models
    resource: Literal["compute", "link", "shared_link", "boundary"]
    busy_s: Seconds  # per minibatch


class Prediction(Record):
    """What to expect of the plan in steady state."""

    seconds_per_minibatch: Annotated[float, Field(gt=0)]
    by: Literal["simulation", "cost model"] = "cost model"  # if the cost model is published, or simulation too slow
    samples_per_s: Annotated[float, Field(gt=0)] | None  # None if the profile does not know its batch size
    bottleneck: Bottleneck
    speedup_over_one_gpu: float
    speedup_over_data_parallel: float
    communication_bytes_per_sample: float | None
    data_parallel_communication_bytes_per_sample: float | None
    communication_cut: float | None = None  # share of data parallelism's bytes that the plan avoids
    tokens_per_s: Annotated[float, Field(gt=0)] | None = None  # None where the model is not of token ids
    flop_utilisation: Annotated[float, Field(gt=0)] | None = None  # of the workers' peak, by the model's own FLOPs


class OtherWay(Record):
    """Another way to train the model on the cluster, to compare the plan with."""

    name: str
    config: str
    schedule: ScheduleField
    microbatches: Annotated[int, Field(ge=1)]  # per minibatch
    seconds_per_microbatch: Seconds
    memory_bytes: Bytes  # of the GPU that needs most
    over_memory_bytes: Bytes = 0  # by how much that exceeds the memory; 0 if it fits


class SolverReport(GrownRecord):
    """How the plan was found, and how far from optimal it can be."""

    later_fields: ClassVar[frozenset[str]] = frozenset({"depth"})

    name: str
    cost_model: Annotated[CostModelName, BeforeValidator(refuse_max_load)]
    status: Literal["optimal", "feasible"]
    lower_bound_s: Seconds  # per minibatch: no plan is faster by the cost model
    gap: Annotated[float, Field(ge=0)]  # (seconds_per_minibatch - lower_bound_s) / seconds_per_minibatch
    seconds: Seconds
    cost_model_s: Seconds | None = None  # per minibatch: this plan by the cost model
    simulated: Annotated[int, Field(ge=0)] = 0  # number of candidates that were simulated
    exhausted: bool = True  # all candidates were simulated that could be faster by the cost model
    depth: Literal["auto", "published"] = "auto"  # how many units in flight stages were given


class Plan(GrownRecord):
    """A complete answer: enough to run, and enough to know what to expect."""

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {"loss", "tf32", "deterministic", "baselines", "synchronous", "notes"}
    )

    schema_version: Literal[1] = 1
    model: str
    profile_digest: str
    graph_hash: str | None  # as in the profile; None for an imported profile, whose plans cannot be trained
    autocast: Autocast | None = None  # stages run under torch.autocast
    memory_format: MemoryFormat | None = None  # of weights and images
    compiled: bool = False  # stages run through torch.compile
    tf32: bool = False  # products of float32 matrices in TF32
    deterministic: bool = False  # deterministic algorithms only
    device: Device
    config: str  # see `config_of`
    schedule: ScheduleField
    microbatch_size: Annotated[int, Field(ge=1)] | None
    loss: LossMean | None = None  # what it is a mean over; None stands for the samples
    microbatches: Annotated[int, Field(ge=1)] = 1  # per minibatch
    vertical_sync: bool = False  # under 1f1b: all stages use the weight version of the first stage
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    transfers: tuple[Transfer, ...]
    shared: tuple[Shared, ...] = ()
    contiguous: AlwaysTrue = True  # always true; files of version 0.1 have it
    predicted: Prediction
    baselines: tuple[OtherWay, ...] = ()  # what people do without a planner; empty where they were not priced
    synchronous: OtherWay | None = None  # beside an asynchronous plan: the best one whose gradients are never late
    notes: tuple[str, ...] = ()  # sentences on what is missing beside the plan, and why
    solver: SolverReport
    cluster: Cluster

    def noting(self, sentence: str) -> Plan:
        """Return the plan with one more note."""
        return self.model_copy(update={"notes": (*self.notes, sentence)})

    @property
    def trainable(self) -> bool:
        """Whether there is a model to train: a plan from an imported profile has none."""
        return self.graph_hash is not None

    @property
    def workers(self) -> int:
        """Number of worker processes."""
        return len({rank for stage in self.stages for rank in stage.ranks})

    @property
    def chunks(self) -> int:
        """Stages per worker: 1, except under schedules with chunks."""
        return len(self.stages) // len({stage.ranks for stage in self.stages})

    @property
    def staleness(self) -> int:
        """How many updates late the gradients are, at the stage where they are latest; 0 as on one device."""
        return max(self.schedule.staleness(stage.in_flight) for stage in self.stages)

    def computing_s(self, stage: Stage) -> float:
        """Return the seconds per minibatch that all ranks of a stage compute together."""
        return stage.tensor * (
            self.microbatches * (stage.compute_s - stage.update_s)
            + stage.update_s * (stage.replicas if self.schedule.divides else 1)
            + stage.accumulate_s * max(0, self.microbatches - stage.replicas)
        )

    @property
    def minibatch_size(self) -> int | None:
        """Samples of a minibatch; None if the profile does not know its batch size."""
        return None if self.microbatch_size is None else self.microbatch_size * self.microbatches

    def memory_bytes(self, stage: int) -> int:
        """Return the peak bytes of each worker that runs the stage, including its other stages."""
        ranks = self.stages[stage].ranks
        return sum(other.memory.total_bytes for other in self.stages if other.ranks == ranks)

    def lacking_bytes(self, stage: int) -> int:
        """Return by how much `memory_bytes` exceeds what the stage's smallest device has; 0 if it fits."""
        limit = self.cluster.memory_on(self.stages[stage].ranks)
        return 0 if limit is None else max(0, self.memory_bytes(stage) - limit)

    def tensor_bytes(self, stage: int) -> int:
        """Return how much of `memory_bytes` are tensors."""
        ranks = self.stages[stage].ranks
        return sum(other.memory.tensor_bytes for other in self.stages if other.ranks == ranks)

    def over_memory_bytes(self, name: str) -> int:
        """Return by how much a baseline exceeds the memory; 0 if it fits, or if it was not priced."""
        return next((way.over_memory_bytes for way in self.baselines if way.name == name), 0)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Ranks of a replica, per stage."""
        return tuple(stage.tensor for stage in self.stages)

    def _check_config(self) -> None:
        """Compare the config with the stages, and write one from before configs told the chunks as they do now."""
        known = config_of(self.replicas, self.chunks, self.degrees)
        if self.config not in (known, config_of(self.replicas)):
            raise ValueError(f"config '{self.config}' contradicts the stages, whose ranks make {known}")
        object.__setattr__(self, "config", known)

    @model_validator(mode="after")
    def _check(self) -> Plan:
        if self.vertical_sync and not self.schedule.stashes:
            raise ValueError(f"vertical_sync is for the schedule {ONE_F_ONE_B}, not {self.schedule}")
        self._check_config()
        _check_microbatches(self)
        _check_ranks(self)
        _check_layers(self)
        _check_transfers(self)
        return self


def config_of(replicas: tuple[int, ...], chunks: int = 1, degrees: tuple[int, ...] = ()) -> str:
    """Return PipeDream's notation, replicas per stage: (7, 1) is "7-1"; (1, 1, 1) is "1-1-1", a straight pipeline.

    A replica that is a group of ranks says how many: "2x4-1x8" is two groups of four, then one of eight.

    Where workers run several stages each, their chunks of the model, every worker counts once: (8, 8, 8, 8) with two
    chunks is "8-8 x2 chunks", on 16 GPUs.
    """
    counts = zip_longest(replicas[: len(replicas) // chunks], degrees[: len(replicas) // chunks], fillvalue=1)
    once = "-".join(f"{r}x{t}" if t > 1 else str(r) for r, t in counts)
    return f"{once} x{chunks} chunks" if chunks > 1 else once


def short_config(config: str, longest: int = LONGEST_CONFIG) -> str:
    """Shorten a long config to its ends: "1-1-...-1 (56 stages)"; chunks of one worker count as one stage."""
    if len(config) <= longest:
        return config
    once, _, chunks = config.partition(" ")
    parts = once.split("-")
    tail = " ".join(word for word in (f"...-{parts[-1]}", chunks, f"({len(parts)} stages)") if word)
    return once[: once.rindex("-", 0, longest - len(tail)) + 1] + tail


def _check_microbatches(plan: Plan) -> None:
    if not plan.schedule.divides and plan.microbatches != 1:
        raise ValueError(f"schedule {plan.schedule} has one microbatch per minibatch, not {plan.microbatches}")
    if plan.schedule.divides and plan.schedule.asynchronous and plan.microbatches < max(plan.replicas):
        raise ValueError(
            f"schedule {plan.schedule} gives every replica of {plan.config} a microbatch of each minibatch, which has "
            f"only {plan.microbatches}"
        )


def _check_ranks(plan: Plan) -> None:
    if len(set(plan.degrees)) > 1 and len(plan.cluster.joined) > 1:
        raise ValueError(f"on several levels the groups of all stages have one size, and not those of {plan.config}")
    stages = [stage.ranks for stage in plan.stages]
    if plan.schedule.chunked:
        workers = len(set(stages))
        repeated = [stages[plan.schedule.worker_of(stage, workers)] for stage in range(len(stages))]
        if stages != repeated or len(stages) % workers:
            raise ValueError(f"the stages' ranks {stages} do not repeat, as those of an {plan.schedule} plan must")
        if len(set(map(len, stages))) > 1:
            raise ValueError(f"the replicas {plan.config} differ, which those of an {plan.schedule} plan must not")
        stages = stages[:workers]
    ranks = list(chain.from_iterable(stages))
    if plan.cluster.kinds:  # a plan may leave slow devices idle
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(plan.cluster.gpus)):
            raise ValueError(f"the stages' ranks {ranks} are not ranks of the cluster, each at most once")
    elif sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"the stages' ranks {ranks} are not 0 to {len(ranks) - 1}, each once")
    if len(ranks) > plan.cluster.gpus:
        raise ValueError(f"{len(ranks)} workers do not fit a cluster of {plan.cluster.gpus} GPUs")


def _check_layers(plan: Plan) -> None:
    seen: set[str] = set()
    for name in chain.from_iterable(stage.layers for stage in plan.stages):
        if name in seen:
            raise ValueError(f"layer '{name}' is in two stages")
        seen.add(name)


def _check_transfers(plan: Plan) -> None:
    seen: set[tuple[int, int]] = set()
    for transfer in plan.transfers:
        if not transfer.source < transfer.target < len(plan.stages):
            raise ValueError(f"transfer {transfer.source} -> {transfer.target} is not from a stage to a later one")
        if (transfer.source, transfer.target) in seen:
            raise ValueError(f"transfer {transfer.source} -> {transfer.target} occurs twice")
        seen.add((transfer.source, transfer.target))


def load_plan(path: Path | str) -> Plan:
    """Read `plan.json`.

    Raises:
        PlanError: naming the file, the field and the value that is wrong.
    """
    return load_record(Plan, path, PlanError, REMEDY)


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write `plan` to `path` atomically."""
    save_record(plan, path)
