"""What a run found of its devices and links that its plan expects otherwise."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from planner.formats.files import Record
from planner.formats.plan import Plan

_AS_PLANNED = 1.25  # seconds relative to the plan's
_FEW = 8  # stages whose layers are counted in a line


class WorkerDrift(Record):
    """A worker whose computations take another time than the plan expects."""

    rank: int
    stage: int | None  # the first that it runs; None: the plan leaves it out
    host: str
    ratio: float  # seconds of its computations, relative to the plan's


class RouteDrift(Record):
    """Messages between two workers that take another time than the plan expects."""

    ranks: tuple[int, int]
    ratio: float  # seconds of a message, relative to the plan's


class Drift(Record):
    """How a run parted from its plan, and what another plan would give.

    All speeds are in samples per second. Those of plans on the devices and links as measured are
    simulated, and None where nobody could solve again: `why_not` says why.
    """

    since: int  # minibatch from which on it was seen
    seen: int  # minibatches that the run had begun when it was certain
    workers: tuple[WorkerDrift, ...] = ()
    routes: tuple[RouteDrift, ...] = ()
    config: str  # of the plan that is run, with its cuts
    planned_samples_per_s: float
    measured_samples_per_s: float
    expected_samples_per_s: float | None = None  # of the plan that is run, on what was measured
    better_config: str | None = None
    better_samples_per_s: float | None = None
    why_not: str = ""

    @property
    def is_as_planned(self) -> bool:
        """Whether all that changed is about as the plan expects it, again."""
        ratios = [worker.ratio for worker in self.workers]
        ratios += [route.ratio for route in self.routes]
        return all(1 / _AS_PLANNED < ratio < _AS_PLANNED for ratio in ratios)

    def __str__(self) -> str:
        """Say it in one line."""
        parted = [*map(_worker_words, self.workers), *map(_route_words, self.routes)]
        sentence = (
            f"{' and '.join(parted)} since minibatch {self.since:,}; this plan, {self.config}, "
            f"gives {self.measured_samples_per_s:.1f} samples/s of "
            f"{self.planned_samples_per_s:.1f}"
        )
        return f"{sentence}; {self._better_words()}"

    def _better_words(self) -> str:
        if self.why_not:
            return f"no other plan was sought: {self.why_not}"
        if self.better_config is None or self.better_samples_per_s is None:
            return "no other plan would be faster"
        return (
            f"{self.better_config} would give {self.better_samples_per_s:.1f}, where this one "
            f"gives {self.expected_samples_per_s:.1f} (both simulated)"
        )


class Move(Record):
    """A change of the plan while a run goes on."""

    minibatch: int  # minibatches done before
    before: str  # plans, in words
    after: str
    seconds: float  # without training
    drained: bool = False  # minibatches were in flight, as under asynchronous schedules
    left_out: tuple[int, ...] = ()  # workers that have no stage any more
    taken_in: tuple[int, ...] = ()  # workers that had none before

    def __str__(self) -> str:
        """Say it in one line."""
        drained = ""
        if self.drained:
            drained = "drained its pipeline, "
        sentence = (
            f"after minibatch {self.minibatch:,} the run {drained}moved from {self.before} to "
            f"{self.after}, and stood still for {self.seconds:.2f} s"
        )
        if self.left_out:
            sentence += f"; it leaves out {_workers_words(self.left_out)}"
        if self.taken_in:
            sentence += f"; it takes in {_workers_words(self.taken_in)} again"
        return sentence


def plan_words(plan: Plan) -> str:
    """Return a plan's configuration with its cuts: plans of the same stages may differ in these."""
    if len(plan.stages) > _FEW:
        return plan.config
    counts = "+".join(str(len(stage.layers)) for stage in plan.stages)
    return f"{plan.config} ({counts} layers)"


def _workers_words(ranks: Sequence[int]) -> str:
    """Return "worker 1", or "workers 1, 2"."""
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _worker_words(worker: WorkerDrift) -> str:
    if worker.stage is None:
        return (
            f"worker {worker.rank} on host {worker.host}, which is left out, takes "
            f"{worker.ratio:.2f} times as long as when it was"
        )

    return (
        f"worker {worker.rank} (stage {worker.stage}) on host {worker.host} takes "
        f"{worker.ratio:.2f} times as long as profiled"
    )


def _route_words(route: RouteDrift) -> str:
    one, other = route.ranks
    return (
        f"messages between workers {one} and {other} take {route.ratio:.2f} times as long as "
        f"planned"
    )


class Corrected(Record):
    """What a plan gives on the devices and links as a run measured them, and a faster one."""

    expected_s: float  # simulated seconds per minibatch of the plan that was run
    better: Plan | None = None  # for as many samples, maybe on fewer workers
    # By layer, how many times as long as profiled it takes, where the work became longer.
    longer: Mapping[str, float] = Field(default_factory=dict)
