"""Train a drawn model file under a drawn plan, in real worker processes, and say how it compares
with one process.
"""

from __future__ import annotations

import json
import math
import os
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from planner.api.running import make_job, profile
from planner.errors import PlannerError
from planner.executor.run.train import train_worker
from planner.formats.plan import Plan
from planner.formats.profile import ChunkedLoss, Profile
from planner.model.capture.capture import capture_file
from planner.model.spec import load_model_file
from planner.model.stage.chunked_loss import UnchunkedLossError, head_and_loss
from planner.options.training import TrainArguments
from planner.plan.attention import attention_groups
from planner.schedule.registry import find
from planner.selfcheck.lab import even_plan
from planner.workers.job import Job
from tests.drawn.model_files import DrawnFile
from tests.drawn.one_process import Reader, largest_difference, train_alone
from tests.executor.processes import run_workers

MICROBATCH_SIZE, STEPS, SEED = 4, 6, 5
CRASHED = "crashed"  # a file that a worker leaves which ends with something else than a sentence
LEFT_S = 20.0  # for the other worker, once one has refused the training
SAME = 2e-3  # weights may differ by this share of the largest change of a weight, by rounding
SAME_IN_BFLOAT16 = 3e-2  # whose digits are fewer: each microbatch's gradients are rounded


@dataclass(frozen=True)
class Shape:
    """How a plan divides the work."""

    schedule: str
    replicas: tuple[int, ...]
    microbatches: int
    loss_chunks: int = 1  # of tokens, where the model's loss can be computed so
    attention_again: bool = False  # recomputes alone, where there is some


# Two workers each, and schedules that equal one device.
SHAPES = (
    Shape("1f1b-flush", (1, 1), 1),
    Shape("1f1b-flush", (1, 1), 2),
    Shape("gpipe", (1, 1), 4),
    Shape("zb-h1", (1, 1), 2),
    Shape("interleaved", (1, 1), 2),
    Shape("1f1b-flush", (2,), 2),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a training.

    Attributes:
        kind: "equal", "different", "refused" with a sentence, or "crashed".
        detail: the sentence, or how far from one process it is.
    """

    kind: str
    detail: str
    shape: Shape


def losses_by_job(job: Job) -> list[float] | None:
    """Train a job as the product's worker does."""
    result = train_worker(job)
    if result is None:
        return None
    return [math.nan if entry.loss is None else entry.loss for entry in result.losses]


def outcome_of(drawn: DrawnFile, folder: Path) -> Outcome:
    """Profile, plan and train a drawn file in `folder`, and compare the training with one
    process.
    """
    path = folder / "model.py"
    path.write_text(drawn.text, encoding="utf-8")
    chosen = random.Random(drawn.seed)
    shape = replace(
        chosen.choice(SHAPES),
        loss_chunks=chosen.choice((1, 3)),
        attention_again=chosen.random() < 0.5,
    )

    try:
        plan = _plan(path, profile(path, batch_size=MICROBATCH_SIZE, seconds=0.0), shape)
        weights = folder / "weights.safetensors"
        arguments = TrainArguments(steps=STEPS, seed=SEED, save_weights=weights)
        losses = trained(make_job(path, plan, arguments), folder)
    except PlannerError as refusal:
        return Outcome("refused", f"{refusal.message} Hint: {refusal.hint}", shape)
    except Exception:
        return Outcome("crashed", traceback.format_exc(), shape)

    return _compared(drawn, path, plan, losses, load_file(weights), shape)


def _plan(path: Path, profiled: Profile, shape: Shape) -> Plan:
    profiled = profiled.model_copy(update={"chunked_loss": chunked(path, shape.loss_chunks)})
    schedule = find(shape.schedule)
    plan = even_plan(profiled, schedule, shape.replicas, microbatches=shape.microbatches)
    if not shape.attention_again:
        return plan

    position = {layer.name: number for number, layer in enumerate(profiled.layers)}
    stages = []
    for stage in plan.stages:
        groups = attention_groups(profiled.layers, [position[name] for name in stage.layers])
        again = tuple(
            tuple(profiled.layers[each].name for each in sorted(group)) for group in groups
        )
        changes = {"recompute": again or False, "recompute_s": 0.0 if again else None}
        stages.append(stage.model_copy(update=changes))
    return plan.model_copy(update={"stages": tuple(stages)})


def chunked(path: Path, chunks: int) -> ChunkedLoss | None:
    """Return how training computes the loss of a file in chunks; None where it does so whole."""
    if chunks == 1:
        return None
    spec = load_model_file(str(path))
    graph = capture_file(spec, spec.example_batch(MICROBATCH_SIZE))
    try:
        found = head_and_loss(graph)
    except UnchunkedLossError:
        return None
    return ChunkedLoss(chunks=chunks, head=graph.layers[found.first_layer].name, again_s=0.0)


def _compared(
    drawn: DrawnFile,
    path: Path,
    plan: Plan,
    losses: list[float],
    weights: dict[str, torch.Tensor],
    shape: Shape,
) -> Outcome:
    spec = load_model_file(str(path))
    reader = Reader(MICROBATCH_SIZE, plan.microbatches, SEED)
    alone = train_alone(spec, reader, SEED, STEPS)
    off_by = largest_difference(alone.after, weights) / max(alone.moved, 1e-9)
    allowed = SAME_IN_BFLOAT16 if drawn.names["region"] == "autocast" else SAME

    detail = f"weights off by {off_by:.1e} of their change; losses {losses} of {alone.losses}"
    same = off_by <= allowed and len(losses) == len(alone.losses)
    return Outcome("equal" if same else "different", detail, shape)


def trained(
    job: Job, folder: Path, train: Callable[[Job], list[float] | None] = losses_by_job
) -> list[float]:
    """Train a job in forked workers, and return its losses by minibatch; raise the error of the
    first worker that refused it.

    Args:
        folder: for its files.
        train: called on each worker; one of them must return the losses, others None.
    """
    log = folder / "workers.log"
    log.touch()
    path = folder / "job.json"
    path.write_text(job.model_dump_json(), encoding="utf-8")
    run = partial(_train, train=train)
    run_workers(run, [str(path)], log, job.plan.workers, left_s=LEFT_S)

    refusals = [path for path in folder.glob("refusal-*.json") if path.stat().st_size]
    if refusals and not (folder / CRASHED).exists():
        raise PlannerError(**json.loads(min(refusals, key=_time_written).read_text("utf-8")))
    result = folder / "losses.json"
    if not result.exists():
        raise RuntimeError(log.read_text("utf-8"))
    losses: list[float] = json.loads(result.read_text("utf-8"))  # may have NaN
    return losses


def _train(paths: Sequence[str], train: Callable[[Job], list[float] | None]) -> None:
    """Train a job as one worker; leave its losses, or the sentence of its refusal, beside the job's
    file.
    """
    path = Path(paths[0])
    job = Job.model_validate_json(path.read_text("utf-8"))
    try:
        losses = train(job)
    except PlannerError as error:
        refusal = path.with_name(f"refusal-{os.environ['RANK']}.json")
        content = {"message": error.message, "hint": error.hint}
        refusal.write_text(json.dumps(content), encoding="utf-8")
        # as a worker of a launcher does: the other one may wait for it for ever
        os._exit(error.exit_code)
    except BaseException:
        # What others say then, such as that a connection broke, is no refusal.
        path.with_name(CRASHED).touch()
        raise
    if losses is not None:
        path.with_name("losses.json").write_text(json.dumps(losses), encoding="utf-8")


def _time_written(path: Path) -> int:
    return path.stat().st_mtime_ns
