"""The Plan: which layers form which stage, on which ranks, under which schedule, and what to expect
of it.
"""

from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from planner.arguments import checked
from planner.errors import PlanError, ProfileError
from planner.formats.cluster import Cluster
from planner.formats.files import AlwaysTrue, GrownRecord, load_record, replace, save_record
from planner.formats.names import EightBits, StackName
from planner.formats.plan_parts import (
    OtherWay,
    PlannedLengths,
    Prediction,
    ScheduleField,
    Shared,
    SlowLinks,
    SolverReport,
    Stage,
    Transfer,
    config_of,
)
from planner.formats.profile import Autocast, ChunkedLoss, Device, LossMean, MemoryFormat
from planner.formats.quantities import MOST_GPUS, MOST_PARTS, Parts, Samples
from planner.formats.shown import Shown, verb
from planner.stages.context import DividedSequences
from planner.stages.replicas import samples_per_update
from planner.stages.sharding import why_whole
from planner.stages.tensor import any_divided, degrees_of, most_ranks, one_degree
from planner.units import counted

REMEDY = "make a plan with: plan solve"
# of a plan and its smaller ones
_ALIKE = ("model", "graph_hash", "schedule", "microbatch_size", "microbatches")
GIVEN = "given"  # the solver's name in plans whose stages a person chose


class Plan(DividedSequences, Shown, GrownRecord):
    """A complete answer: enough to run, and enough to know what to expect."""

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "master_weights",
            "loss",
            "tf32",
            "deterministic",
            "lengths",
            "baselines",
            "synchronous",
            "notes",
        }
    ) | {
        "experts",
        "by_samples",
        "context",
        "smaller",
        "schedules",
        "capture_checked",
        "synchronous_usual",
        "instead_of",
        "slow_links",
        "base_bits",
        "estimated_faster",
        "products",
        "experts_across",
        "stack",
        "chunked_loss",
    }

    schema_version: Literal[1] = 1
    model: str
    profile_digest: str
    # as in the profile; None for an imported profile, whose plans cannot be trained
    graph_hash: str | None
    autocast: Autocast | None = None  # stages run under torch.autocast
    # of the weights, which have copies in float32 that the optimizer steps
    master_weights: Autocast | None = None
    base_bits: Literal[4] | None = None  # of each frozen weight beside adapters, as in the profile
    products: EightBits | None = None  # of linear layers, as in the profile
    stack: StackName | None = None  # whose kernels were estimated
    # of the last stage, where it runs so in training
    chunked_loss: ChunkedLoss | None = None
    memory_format: MemoryFormat | None = None  # of weights and images
    compiled: bool = False  # stages run through torch.compile
    tf32: bool = False  # products of float32 matrices in TF32
    deterministic: bool = False  # deterministic algorithms only
    device: Device
    config: str  # see `config_of`
    schedule: ScheduleField
    # the one that was to be, under which no plan fits the memory
    instead_of: ScheduleField | None = None
    microbatch_size: Samples | None
    loss: LossMean | None = None  # what it is a mean over; None stands for the samples
    # as in the profile; training compares them at its start where that did not
    capture_checked: bool = False
    lengths: PlannedLengths | None = None  # of batches, that vary
    microbatches: Parts = 1  # per minibatch
    # always false; version 0.2 had plans in which it was true
    vertical_sync: Literal[False] = False
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    # Of a layer, which the ranks of a replica divide between them.
    experts: Annotated[int, Field(ge=2, le=MOST_PARTS)] | None = None
    # whether those ranks have a part of a microbatch's samples each, and divide experts alone
    by_samples: bool = False
    # whether they divide experts as the executor does not, across servers
    experts_across: bool = False
    # ranks of a replica that divide the sequences of its microbatches; the others divide its layers
    context: Annotated[int, Field(ge=2, le=MOST_GPUS)] | None = None
    transfers: tuple[Transfer, ...]
    shared: tuple[Shared, ...] = ()
    contiguous: AlwaysTrue = True  # always true; files of version 0.1 have it
    predicted: Prediction
    # what people do without a planner; empty where they were not priced
    baselines: tuple[OtherWay, ...] = ()
    # what this simpler plan takes the place of, where estimates do not tell the two apart:
    # "4-4 is estimated to be 1.2% faster"
    estimated_faster: str = ""
    # Beside an asynchronous plan: the best synchronous one with its global batch, or in older files
    # with a larger one.
    synchronous: OtherWay | None = None
    # Beside the same: the best one with a larger global batch, of the usual number of microbatches.
    synchronous_usual: OtherWay | None = None
    schedules: tuple[OtherWay, ...] = ()  # the best plan under each, if this is the fastest of them
    # what slower links change, where a bandwidth is a data sheet's; None where that was not asked
    slow_links: SlowLinks | None = None
    notes: tuple[str, ...] = ()  # sentences on what is missing beside the plan, and why
    solver: SolverReport
    cluster: Cluster
    # for the GPUs that are left without one host, without two, ...
    smaller: tuple["Plan", ...] = ()

    @property
    def host_bytes(self) -> dict[int, int]:
        """What each GPU, by rank, has in the memory of its host, of all its stages."""
        held: Counter[int] = Counter()
        for stage in self.stages:
            for rank in stage.ranks:
                held[rank] += stage.host_bytes
        return dict(held)

    def noting(self, sentence: str) -> "Plan":
        return replace(self, notes=(*self.notes, sentence))

    def save(self, path: Path | str = "plan.json") -> None:
        """Write the plan to a file."""
        save_record(self, path)

    def compare(self, profile: Any = None, **options: Any) -> Any:
        """Compare the plan with baselines, as `planner.compare(profile, plan)` does.

        Args:
            profile: that it was made from; profile.json where it is None.

        Raises:
            ProfileError: where there is no profile.json.
        """
        source = profile
        if profile is None and not Path("profile.json").exists():
            raise ProfileError(
                "there is no profile.json here to compare the plan with others by",
                hint="give the profile that it was made from: plan.compare(profile)",
            )
        if profile is None:
            source = verb("load_profile")("profile.json")
        return verb("compare")(source, self, **options)

    def report(self, output: Path | str | None = None, **options: Any) -> Path:
        """Write all about the plan to one HTML file, as `planner.report(plan, output)` does."""
        path: Path = verb("report")(self, output, **options)
        return path

    def timeline(self, minibatches: int | None = None) -> Any:
        """Return what workers and links do over time, as `planner.simulate(plan)` does."""
        return verb("simulate")(self, minibatches)

    @property
    def trainable(self) -> bool:
        """Whether there is a model to train: a plan from an imported profile has none."""
        return self.graph_hash is not None

    def on_gpus(self, gpus: int) -> "Plan":
        """Return this plan or a smaller one, for so many GPUs; raise PlanError where there
        is none.
        """
        plans = {plan.cluster.gpus: plan for plan in (*self.smaller, self)}
        if gpus not in plans:
            why = next((f": {note}" for note in self.notes if "cannot be survived" in note), "")
            hint = "solve with a larger `survive`, or allow for fewer losses"
            raise PlanError(
                f"a run that may have {counted(gpus, 'GPU')} needs a plan for them, and there is "
                f"none{why}",
                hint=hint,
            )

        return plans[gpus]

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that have a stage."""
        return frozenset(rank for stage in self.stages for rank in stage.ranks)

    @property
    def workers(self) -> int:
        return len(self.ranks)

    @property
    def chunks(self) -> int:
        return len(self.stages) // len({stage.ranks for stage in self.stages})

    @property
    def staleness(self) -> int:
        """How many updates late the gradients are, at the stage where they are latest; 0 as on one
        device.
        """
        return max(self.schedule.staleness(stage.in_flight) for stage in self.stages)

    @property
    def minibatch_size(self) -> int | None:
        """Samples of a minibatch; None where the profile does not say how many a microbatch has."""
        if self.microbatch_size is None:
            return None
        return self.microbatch_size * self.microbatches

    @property
    def samples_per_update(self) -> tuple[int, int]:
        """Samples whose gradients make an update, at the stages of the fewest and of the most
        replicas.

        These differ under 1f1b alone. Microbatches where their size is not known.
        """
        return samples_per_update(
            self.schedule, self.microbatches, self.microbatch_size, self.replicas
        )

    def memory_bytes(self, stage: int) -> int:
        """Return the peak bytes of each worker that runs the stage, including its other stages."""
        ranks = self.stages[stage].ranks
        return sum(other.memory.total_bytes for other in self.stages if other.ranks == ranks)

    @property
    def splits_backward(self) -> bool:
        """Whether some stage computes the gradients of its weights after those of its inputs."""
        return self.schedule.splits_backward and len(self.stages) > 1

    @property
    def fits(self) -> bool:
        """Whether all stages fit the memory of their devices."""
        return not any(map(self.lacking_bytes, range(len(self.stages))))

    def lacking_bytes(self, stage: int) -> int:
        """Return by how much `memory_bytes` exceeds what the stage's smallest device has; 0 if it
        fits.
        """
        limit = self.cluster.memory_on(self.stages[stage].ranks)
        if limit is None:
            return 0
        return max(0, self.memory_bytes(stage) - limit)

    def tensor_bytes(self, stage: int) -> int:
        """Return how much of `memory_bytes` are tensors."""
        ranks = self.stages[stage].ranks
        return sum(other.memory.tensor_bytes for other in self.stages if other.ranks == ranks)

    def over_memory_bytes(self, name: str) -> int:
        """Return by how much a baseline exceeds the memory; 0 if it fits, or if it was not
        priced.
        """
        return next((way.over_memory_bytes for way in self.baselines if way.name == name), 0)

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Ranks of a replica, per stage."""
        return degrees_of(self.stages)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of the largest groups that divide layers; 1 where none are divided."""
        return most_ranks(self.stages)

    @property
    def divides_layers(self) -> bool:
        return any_divided(self.stages)

    @property
    def shards_divided_layers(self) -> bool:
        """Whether replicas that are groups of ranks divide gradients or weights (2-D)."""
        return self.divides_layers and self.stages[0].shards_gradients

    @property
    def divides_alike(self) -> bool:
        """Whether the replicas of all stages have equally many ranks."""
        return one_degree(self.stages) is not None

    @model_validator(mode="after")
    def _check(self) -> "Plan":
        known = config_of(self.replicas, self.chunks, self.degrees)
        if self.config not in (known, config_of(self.replicas)):
            raise ValueError(
                f"config '{self.config}' contradicts the stages, whose ranks make {known}"
            )

        object.__setattr__(self, "config", known)  # configs did not always tell the chunks
        _check_schedule(self)
        _check_ranks(self)
        _check_context(self)

        layers = [name for stage in self.stages for name in stage.layers]
        if len(set(layers)) < len(layers):
            raise ValueError(f"layer '{Counter(layers).most_common(1)[0][0]}' is in two stages")
        _check_stage_numbers(self)

        for larger, less in pairwise((self, *self.smaller)):
            same = all(getattr(self, name) == getattr(less, name) for name in _ALIKE)
            if less.smaller or less.cluster.gpus >= larger.cluster.gpus or not same:
                raise ValueError(
                    f"{less.config} is no smaller plan of the same model, schedule and minibatch"
                )

        return self


def _check_schedule(plan: Plan) -> None:
    """Raise ValueError for microbatches, replicas or sharding that the schedule has not."""
    schedule = plan.schedule
    microbatches = plan.microbatches
    if not schedule.divides and microbatches != 1:
        raise ValueError(
            f"schedule {schedule} has one microbatch per minibatch, not {microbatches}"
        )

    if schedule.divides and schedule.asynchronous and microbatches < max(plan.replicas):
        raise ValueError(
            f"schedule {schedule} needs a microbatch for every replica of {plan.config}, not "
            f"{microbatches}"
        )

    if any(stage.shards_gradients for stage in plan.stages):
        whole = why_whole(schedule, microbatches, plan.replicas)
        if whole:
            raise ValueError(whole[0])


def _check_stage_numbers(plan: Plan) -> None:
    """Raise ValueError for a number of no stage, and for a transfer that goes back or is double."""
    last = len(plan.stages) - 1
    shared = [stage for each in plan.shared for stage in each.stages]
    highest = max(plan.predicted.bottleneck.stage, *shared, 0)
    if highest > last:
        raise ValueError(f"stage {highest} is named, and the last one is {last}")

    pairs = Counter((transfer.source, transfer.target) for transfer in plan.transfers)
    for (source, target), times in pairs.items():
        if not source < target < len(plan.stages) or times > 1:
            raise ValueError(
                f"transfer {source} -> {target} is not one from a stage to a later one"
            )


def _check_context(plan: Plan) -> None:
    """Raise ValueError for sequences that are divided by other ranks than those of replicas."""
    if not plan.divides_sequences:
        return
    if any(degree % plan.context_ranks for degree in plan.degrees):
        raise ValueError(
            f"context {plan.context} does not divide the ranks of the replicas of '{plan.config}'"
        )


def _check_ranks(plan: Plan) -> None:
    if not plan.divides_alike and len(plan.cluster.joined) > 1:
        raise ValueError(
            f"on several levels the groups of all stages have one size, and not those of "
            f"{plan.config}"
        )

    stages = [stage.ranks for stage in plan.stages]
    if plan.schedule.chunked:
        stages = _ranks_of_workers(plan, stages)

    ranks = list(chain.from_iterable(stages))
    if plan.cluster.kinds:  # a plan may leave slow devices idle
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(plan.cluster.gpus)):
            raise ValueError(
                f"the stages' ranks {ranks} are not ranks of the cluster, each at most once"
            )
    elif sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"the stages' ranks {ranks} are not 0 to {len(ranks) - 1}, each once")

    if len(ranks) > plan.cluster.gpus:
        raise ValueError(f"{len(ranks)} workers do not fit a cluster of {plan.cluster.gpus} GPUs")


def _ranks_of_workers(plan: Plan, stages: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the ranks of the first stage of each worker, which its later stages must have, too."""
    workers = len(set(stages))
    repeated = [stages[plan.schedule.worker_of(stage, workers)] for stage in range(len(stages))]
    if stages != repeated or len(stages) % workers or len(set(plan.replicas)) > 1:
        raise ValueError(
            f"the stages' ranks {stages} do not repeat, as those of an {plan.schedule} plan must"
        )
    return stages[:workers]


def load_plan(path: Path | str) -> Plan:
    """Read `plan.json`; raise PlanError naming the file, the field and the value that is wrong."""
    return load_record(Plan, path, PlanError, REMEDY)


@checked
def save_plan(plan: Plan, path: Path | str) -> None:
    """Write `plan` to `path` atomically.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> planner.save_plan(plan, "plan.json")
        >>> planner.load_plan("plan.json") == plan
        True
    """
    save_record(plan, path)
