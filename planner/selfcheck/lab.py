"""What the checks share: what a case finds, the device and its workers, profiles and plans of the built-in models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

from planner.analysis.own_plan import price, stages_ending_at
from planner.api.running import profile, train
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnPlan
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.runtime import runtime_of
from planner.schedule.instructions import CHUNKS
from planner.schedule.schedule import Schedule
from planner.solver.choose.baselines import equal_counts
from planner.workers.job import TrainResult

SEED = 3
BATCH_SIZE = 4  # samples of a microbatch
_ANY_BANDWIDTH = 1e9  # of plans whose speed does not matter

Result = Literal["passed", "failed", "skipped"]


class Outcome(NamedTuple):
    """What a case found."""

    result: Result  # "skipped" where the case cannot run on this machine
    found: str  # in words, with the numbers; why the case was skipped
    value: float | None = None  # the number that was judged, if there is one
    limit: float | None = None  # the most that it may be


Case: TypeAlias = tuple[str, Callable[[], Outcome]]  # its name, and what finds its outcome; an exception fails it


def judged(good: bool, found: str, value: float | None = None, limit: float | None = None) -> Outcome:
    """Return the outcome of a case that passes or fails."""
    return Outcome("passed" if good else "failed", found, value, limit)


@dataclass
class Lab:
    """Where the checks run."""

    device: torch.device  # of all workers
    workers: int  # of the runs that have several
    folder: Path  # for files; it goes when the self-test ends
    models: tuple[str, ...] = ()  # of the user's, to cut beside the built-in ones
    _profiles: dict[tuple[str, int], Profile] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type != "cpu"

    def profile(self, model: str, batch_size: int = BATCH_SIZE) -> Profile:
        """Profile a model with as few steps as there can be, once."""
        key = model, batch_size
        if key not in self._profiles:
            self._profiles[key] = profile(model, batch_size=batch_size, device=str(self.device), seconds=0.0)
        return self._profiles[key]

    def train(self, model: str, plan: Plan, steps: int) -> TrainResult:
        """Train in worker processes, as `plan train` does; over gloo where they share GPUs, which NCCL cannot."""
        shared = self.on_gpu and plan.workers > runtime_of(self.device).count()
        return train(model, plan, steps=steps, seed=SEED, device=self.device.type, backend="gloo" if shared else None)


def location(builder: str) -> str:
    """Name a built-in model as the command line does."""
    return f"{Path(__file__).with_name('models.py')}:{builder}"


def even_plan(
    profile: Profile, schedule: Schedule, replicas: Sequence[int], *, microbatches: int | None = None
) -> Plan:
    """Return a plan whose stages have equally many layers, whatever a search would choose.

    Args:
        schedule: where it has several chunks per worker, each of the stages has as many.
        replicas: of each stage.
        microbatches: of a minibatch; None for two per worker, under schedules that divide minibatches.
    """
    workers = sum(replicas)
    counts = [*replicas] * ((schedule.fixed_chunks or CHUNKS) if schedule.chunked else 1)
    legal = [layer.name for layer in profile.layers if layer.name not in profile.no_cut_after]
    *ends, _ = accumulate(equal_counts(len(legal), len(counts)))
    stages = zip(stages_ending_at(profile, [legal[end - 1] for end in ends]), counts, strict=True)
    own = OwnPlan(
        stages=tuple(stage.model_copy(update={"replicas": count}) for stage, count in stages),
        schedule=schedule,
        microbatches=microbatches or (2 * workers if schedule.divides else 1),
    )
    return price(profile, flat_cluster(workers, _ANY_BANDWIDTH), own)
