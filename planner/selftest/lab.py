"""What the checks share: what a case finds, the device and its workers, profiles and plans of the built-in models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from planner.analysis.own_plan import price
from planner.api import profile, train
from planner.formats.cluster import flat_cluster
from planner.formats.names import Backend, DeviceType
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.schedule.instructions import CHUNKS
from planner.schedule.schedule import Schedule
from planner.workers.job import TrainResult

SEED = 3
BATCH_SIZE = 4  # samples of a microbatch
_ANY_BANDWIDTH = 1e9  # of plans whose speed does not matter


Result = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What a case found.

    Attributes:
        result: whether it is as it should be; "skipped" where the case cannot run on this machine.
        found: in words, with the numbers; why the case was skipped.
        value: the number that was judged, if there is one.
        limit: the most that it may be.
    """

    result: Result
    found: str
    value: float | None = None
    limit: float | None = None


Case: TypeAlias = tuple[str, Callable[[], Outcome]]  # its name, and what finds its outcome; an exception fails it


def judged(good: bool, found: str, value: float | None = None, limit: float | None = None) -> Outcome:
    """Return the outcome of a case that passes or fails."""
    return Outcome("passed" if good else "failed", found, value, limit)


@dataclass
class Lab:
    """Where the checks run.

    Attributes:
        device: of all workers.
        workers: of the runs that have several.
        folder: for files; it goes when the self-test ends.
        models: of the user's, to cut beside the built-in ones.
    """

    device: torch.device
    workers: int
    folder: Path
    models: tuple[str, ...] = ()
    _profiles: dict[tuple[str, int], Profile] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def profile(self, model: str, batch_size: int = BATCH_SIZE) -> Profile:
        """Profile a model with as few steps as there can be, once."""
        key = model, batch_size
        if key not in self._profiles:
            self._profiles[key] = profile(model, batch_size=batch_size, device=str(self.device), seconds=0.0)
        return self._profiles[key]

    def train(self, model: str, plan: Plan, steps: int) -> TrainResult:
        """Train in worker processes, as `plan train` does; over gloo where they share GPUs, which NCCL cannot."""
        device: DeviceType = "cuda" if self.cuda else "cpu"
        backend: Backend | None = "gloo" if self.cuda and plan.workers > torch.cuda.device_count() else None
        return train(model, plan, steps=steps, seed=SEED, device=device, backend=backend)


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
    layers = [layer.name for layer in profile.layers]
    ends = [end for end, name in enumerate(layers, 1) if name not in profile.no_cut_after]
    cuts = [0, *(ends[len(ends) * stage // len(counts) - 1] for stage in range(1, len(counts) + 1))]
    stages = tuple(
        OwnStage(layers=tuple(layers[start:end]), replicas=count)
        for (start, end), count in zip(pairwise(cuts), counts, strict=True)
    )
    microbatches = microbatches or (2 * workers if schedule.divides else 1)
    own = OwnPlan(stages=stages, schedule=schedule, microbatches=microbatches)
    return price(profile, flat_cluster(workers, _ANY_BANDWIDTH), own)
