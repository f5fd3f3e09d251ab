"""What the checks share: what a case finds, the device and its workers, profiles and plans of the
built-in models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

from planner.analysis.given_plan import price, stages_ending_at
from planner.api.running import profile, train
from planner.formats.cluster import flat_cluster
from planner.formats.files import replace
from planner.formats.names import Backend
from planner.formats.own_plan import OwnPlan
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.runtime import runtime_of
from planner.schedule.instructions import CHUNKS
from planner.schedule.schedule import Schedule
from planner.solver.by_hand import equal_counts
from planner.workers.job import TrainResult

SEED = 3
BATCH_SIZE = 4  # samples of a microbatch

Result = Literal["passed", "failed", "skipped"]


class Outcome(NamedTuple):
    """What a case found: see `planner.selfcheck.run.Row`."""

    result: Result
    found: str
    value: float | None = None
    limit: float | None = None


# its name, and what finds its outcome; an exception fails it
Case: TypeAlias = tuple[str, Callable[[], Outcome]]


def judged(
    good: bool, found: str, value: float | None = None, limit: float | None = None
) -> Outcome:
    """Return the outcome of a case that is good or not."""
    return Outcome("passed" if good else "failed", found, value, limit)


@dataclass
class Lab:
    """Where the checks run."""

    device: torch.device  # of all workers
    workers: int  # of the runs that have several
    folder: Path  # for temporary files
    models: tuple[str, ...] = ()  # of the user's, to cut beside the built-in ones
    # of the messages; None for the device's own where each worker has a GPU, else gloo
    backend: Backend | None = None
    _profiles: dict[tuple[str, int], Profile] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def profile(self, model: str, batch_size: int = BATCH_SIZE) -> Profile:
        """Profile a model with as few steps as there can be, once."""
        if (key := (model, batch_size)) not in self._profiles:
            self._profiles[key] = profile(
                model, batch_size=batch_size, device=str(self.device), seconds=0.0
            )
        return self._profiles[key]

    def train(self, model: str, plan: Plan, steps: int) -> TrainResult:
        """Train in worker processes, as `plan train` does; unless told over gloo where they share
        GPUs.
        """
        shared = self.on_gpu and plan.workers > runtime_of(self.device).count()
        backend = self.backend or ("gloo" if shared else None)
        return train(model, plan, steps=steps, seed=SEED, device=self.device.type, backend=backend)


def location(builder: str) -> str:
    """Name a built-in model as the command line does."""
    return f"{Path(__file__).with_name('models.py')}:{builder}"


def even_plan(
    profile: Profile,
    schedule: Schedule,
    replicas: Sequence[int],
    *,
    microbatches: int | None = None,
) -> Plan:
    """Return a plan whose stages have equally many layers and these replicas, whatever a search
    would choose.
    """
    workers = sum(replicas)
    counts = [*replicas] * ((schedule.fixed_chunks or CHUNKS) if schedule.chunked else 1)
    legal = [layer.name for layer in profile.layers if layer.name not in profile.no_cut_after]
    *ends, _ = accumulate(equal_counts(len(legal), len(counts)))
    cut = zip(stages_ending_at(profile, [legal[end - 1] for end in ends]), counts, strict=True)
    stages = tuple(replace(stage, replicas=count) for stage, count in cut)
    microbatches = microbatches or (2 * workers if schedule.divides else 1)
    own = OwnPlan(stages=stages, schedule=schedule, microbatches=microbatches)
    return price(profile, flat_cluster(workers, bandwidth_bytes_per_s=1e9), own)
