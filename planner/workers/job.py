"""The records of a training run, which travel as JSON: what to do, and what came of it."""

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from planner.formats.drift import Drift, Move
from planner.formats.files import Record
from planner.formats.late import LateFailure
from planner.formats.names import Backend, DeviceType
from planner.formats.plan import Plan
from planner.formats.shown import Shown
from planner.options.training import (
    BaselineName,
    CheckpointOptions,
    DriftOptions,
    ElasticOptions,
    RunOptions,
    TrainingOptions,
)

TIMELINE_FILE = "timeline.json"  # in the job's folder, from rank 0
# in the environment of the workers: the process that launched them
LAUNCHER_VARIABLE = "PLAN_LAUNCHER_PID"
# In the environment of an elastic run's workers: a file that one makes whose run ended well, except
# that something could not be written that was asked for. With an exit code of 1, torchrun's agent
# would start the workers again.
LATE_VARIABLE = "PLAN_LATE_FAILURE"


class Job(Record):
    """One training run, the same on every worker.

    At most one of `steps` and `epochs` is set. `baseline` trains without the pipeline for
    comparison.
    """

    model: str  # "model.py" or "model.py:builder"; the class of a model in memory
    in_memory: bool = False  # the launching process hands the model over
    plan: Plan
    steps: Annotated[int, Field(ge=1)] | None = None  # minibatches
    epochs: Annotated[int, Field(ge=1)] | None = None
    # of users, that register the plan's schedule: workers import them before they read the plan
    schedule_files: tuple[str, ...] = ()
    seed: int = 0
    device: DeviceType | None = None  # None: the kind that the plan was made for
    backend: Backend | None = None  # of messages; None: NCCL between GPUs, gloo between CPUs
    options: TrainingOptions = TrainingOptions()
    run_options: RunOptions = RunOptions()
    drift: DriftOptions = DriftOptions()
    elastic: ElasticOptions = ElasticOptions()
    # how many GPUs the plan is for, and what speed they leave, where hosts may be lost
    left: str = ""
    baseline: BaselineName | None = None
    save_weights: str | None = None
    # whether workers make the weights of their own stages only; None: where needed
    defer_weights: bool | None = None
    checkpoints: CheckpointOptions = CheckpointOptions()
    show_progress: bool = False
    run: str = ""  # identifies the run; the same for all its restarts
    started_again: bool = False  # after a failure
    folder: str | None = None  # of the launching process: for what workers leave it

    @property
    def scales_loss(self) -> bool:
        """Whether losses are scaled: the gradients of unscaled ones underflow in float16."""
        return "float16" in (self.plan.autocast, self.plan.master_weights)


class WorkerReport(Record):
    """What a worker says of a run: how busy it was, and its memory."""

    rank: int
    stage: int | None  # None: the plan leaves the worker out
    busy_share: float  # of the steady state, spent in forward, backward and update
    samples_per_s: float  # in steady state, through this replica
    peak_memory_bytes: int  # allocated
    predicted_memory_bytes: int  # of tensors, to compare with that
    weight_versions: int
    deferred_weights: bool = False  # whether it made no other stage's weights
    reserved_memory_bytes: int | None = None  # by the allocator at the peak, on a GPU
    # of the GPU by all its processes, contexts and communicators included
    used_memory_bytes: int | None = None


class Loss(Record):
    """Loss of one minibatch, before its update; None if it is not finite, which JSON cannot say."""

    minibatch: int
    loss: float | None


class Evaluation(Record):
    """Means over the samples of evaluation_dataset(); None if they are not finite."""

    minibatch: int  # minibatches trained before
    samples: int
    loss: float | None
    # from metrics(output, target)
    metrics: Mapping[str, float | None] = Field(default_factory=dict)

    def __str__(self) -> str:
        found = {"loss": self.loss, **self.metrics}
        return ", ".join(
            f"{name} {math.nan if value is None else value:.4f}" for name, value in found.items()
        )


class TrainResult(Shown, Record):
    """What a run measured, and what the plan predicted.

    If workers were restarted, losses and evaluations are of the whole run, and measurements since
    the last restart.
    """

    config: str
    context: int | None = None  # ranks that divide every sequence, which `config` counts
    device: str | None = None  # the kind that computed
    device_name: str | None = None  # of worker 0
    backend: Backend | None = None  # of messages
    schedule: str  # the plan's schedule, or "data-parallel"
    workers: int
    minibatches: int  # trained in this run
    # earlier ones were trained by earlier runs, or before the last restart
    first_minibatch: int = 0
    minibatch_size: int
    samples: int
    seconds: float  # the whole run, start-up and drain included
    samples_per_s: float  # steady state
    predicted_samples_per_s: float | None
    random_data: bool  # without dataset() batches are random, and losses mean nothing
    losses: tuple[Loss, ...]
    evaluations: tuple[Evaluation, ...] = ()
    reports: tuple[WorkerReport, ...]
    saved_weights: str | None = None
    resumed_from: str | None = None  # checkpoint
    restarts: tuple[str, ...] = ()  # why the workers were restarted, each time
    drift: tuple[Drift, ...] = ()  # where devices and links were not as planned, each time
    moves: tuple[Move, ...] = ()  # to other plans; all else is of the last one, or of the whole run
    checkpoint: str | None = None  # the newest that this run wrote
    # seconds that worker 0 spent on checkpoints, waiting for the other workers included
    checkpoint_s: float = 0.0
    late_failures: tuple[LateFailure, ...] = ()  # what could not be written when all this was known


class Failure(Record):
    """Why a worker failed, as it tells the others and the launching process."""

    rank: int
    stage: int | None
    activity: str | None = None  # "in the forward of minibatch 17"
    message: str
    hint: str
    # a failure never ends with 0, whoever wrote this
    exit_code: Annotated[int, Field(ge=1, le=255)]
    traceback: str = ""
    again: bool = True  # whether a restart may help
    consequence: bool  # whether another worker failed first, as a lost connection tells
