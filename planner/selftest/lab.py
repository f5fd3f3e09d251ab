"""What the checks share: the device, the workers, a temporary folder, and the ways to a profile and to a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from planner.api import profile, train
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.formats.names import Backend
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.spec import TrainingSpec, load_model_file
from planner.options.training import CheckpointOptions, RunOptions, TrainingOptions
from planner.schedule.instructions import CHUNKS
from planner.schedule.schedule import Schedule
from planner.solver.assemble import assemble
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.workers.job import TrainResult

SEED = 3
MODELS = Path(__file__).parent / "models"
_ANY_BANDWIDTH = 1e9  # of plans whose speed does not matter


@dataclass
class Lab:
    """Where the checks run.

    Attributes:
        device: of all workers.
        workers: of the runs that have several.
        folder: for files; it goes when the self-test ends.
        profiles: a folder with models of the user's, or None.
    """

    device: torch.device
    workers: int
    folder: Path
    profiles: Path | None = None
    _profiles: dict[tuple[str, int, float], Profile] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def backend(self, workers: int) -> Backend | None:
        """Return what so many workers send with: gloo where they share GPUs, since NCCL needs one for each."""
        return "gloo" if self.cuda and workers > torch.cuda.device_count() else None

    def profile(self, model: str, batch_size: int, seconds: float = 0.0) -> Profile:
        """Profile a model, once; by default with as few steps as there can be."""
        key = model, batch_size, seconds
        if key not in self._profiles:
            self._profiles[key] = profile(model, batch_size=batch_size, device=str(self.device), seconds=seconds)
        return self._profiles[key]

    def train(
        self,
        model: str,
        plan: Plan,
        steps: int,
        *,
        options: TrainingOptions | None = None,
        checkpoints: CheckpointOptions | None = None,
        run_options: RunOptions | None = None,
    ) -> TrainResult:
        """Train in workers of their own, as `plan train` does."""
        return train(
            model,
            plan,
            steps=steps,
            seed=None if checkpoints is not None and checkpoints.resume else SEED,
            device="cuda" if self.cuda else "cpu",
            backend=self.backend(plan.workers),
            options=options,
            checkpoints=checkpoints,
            run_options=run_options,
        )


def location(model: str, builder: str = "build_model") -> str:
    """Return the location of a built-in model."""
    return f"{MODELS / model}.py:{builder}"


def spec_of(model: str) -> TrainingSpec:
    """Load the model file at a location."""
    return load_model_file(model)


def even_plan(
    profile: Profile,
    schedule: Schedule,
    replicas: Sequence[int],
    *,
    recompute: bool = False,
    microbatches: int | None = None,
) -> Plan:
    """Return a plan whose stages have equally many layers, whatever a solver would choose.

    Args:
        schedule: if it has several chunks per worker, each of the stages has as many.
        replicas: of each stage; one for each worker's under schedules with chunks.
        recompute: whether stages recompute: by turns the first half of their layers, and all of them at once.
        microbatches: of a minibatch; None for two per worker, under schedules that divide minibatches.
    """
    chunks = schedule.fixed_chunks or CHUNKS
    workers = sum(replicas)
    replicas = [*replicas] * chunks
    layers, stages = len(profile.layers), len(replicas)
    cuts = [layers * stage // stages for stage in range(stages + 1)]
    layer_costs = LayerCosts(profile)
    chosen = candidates([list(range(start, end)) for start, end in pairwise(cuts)], replicas)
    microbatches = microbatches or (2 * workers if schedule.divides else 1)
    cluster = flat_cluster(workers, _ANY_BANDWIDTH)
    problem = Problem(layer_costs, Setting(cluster, schedule, microbatches, chunks))
    plan = assemble(problem, Evaluation(tuple(chosen), problem.price(chosen)))
    if not recompute:
        return plan
    changes = [
        {"recompute": True} if number % 2 else {"recompute": (s.layers[: -(-len(s.layers) // 2)],), "recompute_s": 0.0}
        for number, s in enumerate(plan.stages)
    ]
    changed = [stage.model_copy(update=change) for stage, change in zip(plan.stages, changes, strict=True)]
    return plan.model_copy(update={"stages": tuple(changed)})
