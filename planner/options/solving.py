"""Which plan to search for: the options of `solve`, from the command line to the search."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from planner.errors import InputError
from planner.options.numbers import degrees
from planner.options.option import Options, option
from planner.schedule.instructions import CHUNKS, LATE_UPDATES, MICROBATCHES_PER_GPU
from planner.schedule.registry import AUTO, DEFAULT, NAMES, SCHEDULES, find, own_name, summaries
from planner.schedule.schedule import Schedule
from planner.units import parse_seconds

if TYPE_CHECKING:
    from planner.formats.cluster import Cluster
    from planner.formats.profile import Profile

# The help of the options below says what these mean.
RecomputeRule = Literal["auto", "never", "always", "blocks"]
ShardRule = Literal["auto", "never", "always"]
Granularity = Literal["auto", "block", "layer"]
DepthRule = Literal["auto", "published"]
SolverName = Literal["auto", "search", "ilp"]

OptionsT = TypeVar("OptionsT", bound="SolveOptions")

UNLIMITED = 2**30  # units in flight
TIME_LIMIT_S = 60.0


@dataclass
class Progress:
    """The best plan and the best bound so far. Searches write it; any thread may read it, and stop
    them.
    """

    step: str = ""  # of a question with several, for people
    config: str = ""  # of the best plan so far; empty without one
    best_s: float = math.inf  # its seconds per minibatch
    simulated: bool = True  # whether that is the time of a simulation; else waiting is left out
    bound_s: float = 0.0  # seconds per minibatch that no plan is below, as far as is known
    # when the search must answer, on the monotonic clock; None without a limit
    ends_at_s: float | None = None
    # set, it ends searches as if time were over
    stop: threading.Event = field(default_factory=threading.Event)

    def begin(self, ends_at_s: float | None, bound_s: float) -> None:
        """Begin a search that knows nothing but a bound yet."""
        self.config = ""
        self.best_s = math.inf
        self.bound_s = bound_s
        self.ends_at_s = ends_at_s

    def meet(
        self,
        config: str,
        seconds: float,
        *,
        instead_of_s: float = math.inf,
        simulated: bool = True,
    ) -> None:
        """Take note of a plan that may be the answer, of those of `instead_of_s` in the place of
        which it comes: it may take longer, and be less late.
        """
        if seconds < self.best_s or instead_of_s == self.best_s < math.inf:
            self.config = config
            self.best_s = seconds
            self.simulated = simulated


def time_limit(text: str) -> float:
    """Parse how long a search may take: "30s", or "none"."""
    return math.inf if text == "none" else parse_seconds(text)


@dataclass(frozen=True)
class StageRules(Options):
    """What the stages of a plan may be like."""

    recompute: RecomputeRule = option(
        "auto",
        "activation checkpointing: recompute as few layers as memory demands (auto), none "
        "(never), whole stages (always), or every block by itself (blocks)",
    )
    shard_optimizer: ShardRule = option(
        "auto",
        "shard the optimizer's state over a stage's replicas (ZeRO-1) where that is better "
        "(auto), never, or always",
        advanced=True,
    )
    max_stages: int | None = option(
        None, "at most N stages", "N", least=1, told="no limit", advanced=True
    )
    max_staleness: int | None = option(
        None,
        "gradients at most N updates stale: 0 as on one device, n - 1 or more of n stages under "
        "1f1b, 1 under 2bw",
        "N",
        least=0,
        told=f"no limit, and a warning above {LATE_UPDATES}",
    )
    granularity: Granularity = option(
        "auto",
        "where to cut a model of repeated blocks, as transformers are: between blocks only "
        "(block), anywhere (layer), "
        "or inside blocks only where that makes the plan 2% faster (auto)",
        advanced=True,
    )
    tensor: Sequence[int] = option(
        (),
        "degrees of tensor parallelism to try, as in 1,2,4, if profiled",
        "T,T",
        parse=degrees,
        aliases=("--tensor-parallel-size",),
        told="all profiled degrees that split the GPUs of a server evenly",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tensor", tuple(self.tensor))

    def deepest(self, schedule: Schedule) -> int:
        """Return the most units that a stage may have in flight, each with an older version of its
        weights.
        """
        return (
            self.max_staleness + 1
            if schedule.stashes and self.max_staleness is not None
            else UNLIMITED
        )


@dataclass(frozen=True, kw_only=True)
class SolveOptions(StageRules):
    """What to search for, beside profile and cluster."""

    schedule: Schedule | str = option(DEFAULT, summaries(SCHEDULES), choices=NAMES, parse=own_name)
    microbatches: int | None = option(
        None,
        "microbatches of a global batch, on all replicas together, under schedules that have "
        "several; not with `minibatch`",
        "M",
        told=f"{MICROBATCHES_PER_GPU} per GPU",
    )
    minibatch: int | None = option(
        None,
        "global batch: samples of a minibatch, a multiple of the profile's `batch_size`",
        "SIZE",
        least=1,
        aliases=("--global-batch-size",),
    )
    chunks: int = option(
        CHUNKS, "chunks of the model on each GPU, for interleaved", "V", advanced=True
    )
    depth: DepthRule = option(
        "auto",
        "minibatches in flight under 1f1b and 2bw, microbatches under 1f1b-flush: as published, "
        "or more (auto) where "
        "workers would wait otherwise; under 1f1b each further update of staleness must gain at "
        "least 5%",
        advanced=True,
    )
    accept_divided_loss: bool = option(
        False,
        "split global batches into microbatches even if the loss is not a mean over samples: "
        "train on the mean of the microbatches' losses",
        advanced=True,
    )
    solver: SolverName = option(
        "auto",
        "search: exact over all cuts of the model's graph, or along the profile's order where "
        "these are too many; ilp: "
        "an integer program along the order; auto: the search where it can",
        advanced=True,
    )
    survive: int = option(
        0,
        "also find plans for 1 to N hosts fewer, with the same global batch; a host is a server, "
        "or a GPU where all GPUs are connected alike",
        "N",
        least=0,
        advanced=True,
    )
    time_limit_s: float | None = option(
        TIME_LIMIT_S,
        "stop after a time such as 30s, and answer with the best plans so far; none: search to the "
        "end",
        "TIME",
        flag="--time-limit",
        unit="s",
        parse=time_limit,
        told=f"{TIME_LIMIT_S:g}s",
    )
    progress: Progress | None = option(None, "is told the best plan and bound so far", flag=None)

    # Whether the schedule came as a name, or is another one than the default.
    asked: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = type(self).__dataclass_fields__["schedule"].default
        object.__setattr__(
            self, "asked", isinstance(self.schedule, str) or self.schedule is not usual
        )
        # which has no order: only who solves under all schedules takes it
        if self.schedule != AUTO:
            object.__setattr__(self, "schedule", find(self.schedule))
        if self.microbatches is not None and self.minibatch is not None:
            raise InputError(
                "`microbatches` and `minibatch` say the same twice", hint="leave out one of them"
            )

    @property
    def order(self) -> Schedule:
        """The schedule itself, where `schedule` may have been given by its name."""
        return find(self.schedule)

    @property
    def rules(self) -> StageRules:
        """What stages may be like, alone."""
        return StageRules(**{each.name: getattr(self, each.name) for each in fields(StageRules)})

    @property
    def chunks_per_gpu(self) -> int:
        """Stages on each GPU."""
        return self.order.fixed_chunks or self.chunks

    @property
    def names_solver(self) -> bool:
        """Whether the user named what is to answer, so that nothing else competes with it."""
        return self.solver != "auto"

    def under(self, schedule: Schedule, microbatches: int | None = None) -> "SolveOptions":
        """Return the options under a schedule that the user did not ask for.

        Under one that divides no minibatches, each is one microbatch.

        Args:
            schedule: in place of that of the options.
            microbatches: in place of the options' microbatches or minibatch; None keeps these.
        """
        changed = replace(self, schedule=schedule)
        if microbatches is not None:
            changed = replace(changed, microbatches=microbatches, minibatch=None)
        elif not schedule.divides:
            changed = replace(changed, microbatches=None)
        object.__setattr__(changed, "asked", False)
        return changed

    def with_minibatch(self, samples: int | None) -> "SolveOptions":
        """Return the options for minibatches of so many samples; a schedule that was asked for
        stays so.
        """
        return self.changed(minibatch=samples)

    def changed(self: OptionsT, **values: Any) -> OptionsT:
        """Return the options with other values; a schedule that was asked for stays so."""
        schedule = self.order.name if self.asked else self.schedule
        return replace(self, schedule=schedule, **values)

    def microbatches_on(self, cluster: "Cluster", profile: "Profile") -> int:
        """Return the microbatches per minibatch; raise InputError where the profile's or the
        schedule's make none.
        """
        if self.minibatch is None:
            usual = MICROBATCHES_PER_GPU * cluster.gpus if self.order.divides else 1
            return usual if self.microbatches is None else self.microbatches

        size = profile.microbatch_size
        if size is None:
            raise InputError(
                f"the profile of '{profile.model}' does not know its batch size, so "
                f"`minibatch={self.minibatch}` is no "
                "number of its microbatches",
                hint="give `microbatches`",
            )

        count, rest = divmod(self.minibatch, size)
        if rest or count < 1:
            raise InputError(
                f"`minibatch={self.minibatch}` is no multiple of the {size} samples of a "
                f"microbatch",
                hint=f"give `minibatch={max(1, count) * size}`, or a profile with another "
                f"`batch_size`",
            )

        if count > 1 and not self.order.divides:
            raise InputError(
                f"under {self.schedule} a minibatch has the {size} samples that were profiled, not "
                f"`minibatch={self.minibatch}`",
                hint=f"profile with `batch_size={self.minibatch}`, or use a `schedule` that "
                f"has several microbatches, such as 1f1b-flush",
            )

        return count
