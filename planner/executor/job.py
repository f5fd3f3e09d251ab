"""What a training run is asked to do, and what it reports. Both are plain records that travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from planner.executor.defaults import CHECKPOINT_FOLDER, CHECKPOINTS_KEPT, HANG_TIMEOUT_S, TRACE_MINIBATCHES
from planner.formats.files import Record
from planner.formats.plan import Plan

LAUNCHER_VARIABLE = "PLAN_LAUNCHER_PID"  # in the environment: tells workers whose children they are
BaselineName = Literal["data-parallel"]


class TrainingOptions(Record):
    """How to train, beside what the plan and the model file say."""

    drop_last: bool = False  # leave out the last, smaller minibatch of an epoch
    evaluate_every: Annotated[int, Field(ge=1)] | None = None  # minibatches; None does not evaluate
    scale_lr: bool = False  # multiply a stage's learning rate by the minibatches that its updates average
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None  # of all gradients, or of each stage's under 1f1b, 2bw
    tensorboard: str | None = None  # folder for TensorBoard
    accumulate: Annotated[int, Field(ge=1)] = 1  # minibatches per replica between two updates, under 1f1b
    deferred_batch_norm: bool = False  # running statistics of whole minibatches, however these are divided


class RunOptions(Record):
    """How a run is looked after; nothing here changes what is trained."""

    hang_timeout_s: Annotated[float, Field(gt=0)] = HANG_TIMEOUT_S  # beyond the slowest instruction
    trace: str | None = None  # file for a Chrome trace of what the workers did
    trace_minibatches: tuple[int, int] | int = TRACE_MINIBATCHES  # [first, end), or the last ones of the run
    interface: str | None = None  # network interface to use; loopback on one host, else what torch finds
    max_restarts: Annotated[int, Field(ge=0)] = 0  # after failures, from the last complete checkpoint
    stop_on_nan: bool = False  # end when a loss is no finite number


class CheckpointOptions(Record):
    """Which checkpoints to write, and which to go on from."""

    every: Annotated[int, Field(ge=1)] | None = None  # minibatches; None writes none
    folder: str = CHECKPOINT_FOLDER
    keep: Annotated[int, Field(ge=1)] = CHECKPOINTS_KEPT
    resume: str | None = None  # a checkpoint, or "auto" for the newest in the folder, if any


class Job(Record):
    """One training run; every worker gets the same.

    Exactly one of `steps` and `epochs` is set. `baseline` trains without the pipeline for comparison:
    "data-parallel" with DistributedDataParallel on as many workers as the plan has, reducing gradients once per
    minibatch where the plan divides these.
    """

    model: str  # "model.py" or "model.py:builder"
    plan: Plan
    steps: Annotated[int, Field(ge=1)] | None = None  # minibatches
    epochs: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    options: TrainingOptions = TrainingOptions()
    run_options: RunOptions = RunOptions()
    baseline: BaselineName | None = None
    save_weights: str | None = None
    defer_weights: bool = False  # each worker makes the weights of its own stage alone
    checkpoints: CheckpointOptions = CheckpointOptions()
    show_progress: bool = False
    predicted_samples_per_s: float | None = None  # where that is not the plan's, because of an option
    run: str = ""  # tells runs apart; all starts of a run have the same
    started_again: bool = False  # after a failure
    result_path: str | None = None  # where rank 0 leaves the result for the launching process
    failure_folder: str | None = None  # where a failing worker leaves its reason, and all of them what they do


class WorkerReport(Record):
    """What one worker measured."""

    rank: int
    stage: int
    busy_share: float  # of the steady state, spent in forward, backward and update
    samples_per_s: float  # in steady state, this replica's share
    peak_memory_bytes: int
    predicted_memory_bytes: int
    weight_versions: int


class Loss(Record):
    """Loss of one minibatch, before the update it caused; None where it is no finite number, which JSON cannot say."""

    minibatch: int
    loss: float | None


class Evaluation(Record):
    """Means over the samples of evaluation_dataset(); None where they are no finite numbers."""

    minibatch: int  # minibatches trained until then
    samples: int
    loss: float | None
    metrics: Mapping[str, float | None] = Field(default_factory=dict)  # what metrics(output, target) says


class TrainResult(Record):
    """What a run measured, beside what the plan predicted.

    Where workers were started again, losses and evaluations are those of the whole run, and what is measured is since
    the last start.
    """

    config: str
    schedule: str  # the plan's schedule, or "data-parallel"
    workers: int
    minibatches: int  # trained in this run
    first_minibatch: int = 0  # those before it were trained in earlier runs, or before the last restart
    minibatch_size: int
    samples: int
    seconds: float  # the whole run, start-up and drain included
    samples_per_s: float  # steady state
    predicted_samples_per_s: float | None
    random_data: bool  # no dataset(): batches are random, the loss means nothing
    losses: tuple[Loss, ...]
    evaluations: tuple[Evaluation, ...] = ()
    reports: tuple[WorkerReport, ...]
    saved_weights: str | None = None
    resumed_from: str | None = None  # checkpoint
    restarts: tuple[str, ...] = ()  # why the workers were started again
    checkpoint: str | None = None  # the newest that this run wrote
    checkpoint_s: float = 0.0  # seconds in which worker 0 wrote checkpoints or waited for their other parts


class Failure(Record):
    """Why a worker ended: left in a file for the launching process."""

    rank: int
    stage: int | None
    activity: str | None = None  # "in the forward of minibatch 17"
    message: str
    hint: str
    exit_code: int
    traceback: str = ""
    again: bool = True  # whether starting once more may help
    consequence: bool  # a lost connection or the like: another worker failed first
