"""A run that is stopped at a checkpoint and goes on equals, to the bit, one that drained its
pipeline there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from planner.executor.checkpoint.folders import complete, load_checkpoint
from planner.executor.checkpoint.optimizer_state import from_json
from planner.executor.stage.optimizer import FIRST_SCALE
from planner.formats.plan import Plan
from planner.model.options import PLAIN, ModuleOptions
from planner.options.training import TrainingOptions
from planner.workers.job import Job, TrainResult
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

SEED = 3
BATCH_SIZE = 4
CASES = [
    ("convolutional", "adamw"),
    ("language", "sgd"),
    ("convolutional", "momentum"),
    ("blocks", "adamw"),
]


def job_of(path: Path, plan: Plan, folder: Path, name: str, steps: int, **options: object) -> Job:
    """A run with checkpoints in a folder of its own, and its weights beside it."""
    content = {
        "model": str(path),
        "plan": plan,
        "steps": steps,
        "seed": SEED,
        "save_weights": str(folder / f"{path.stem}-{name}.pt"),
        "checkpoints": {
            "checkpoint_folder": str(folder / f"{path.stem}-{name}"),
            "checkpoint_every": 7,
        }
        | options,
    }
    return Job.model_validate(content)


def weights_of(job: Job) -> dict[str, torch.Tensor]:
    assert job.save_weights is not None
    state: dict[str, torch.Tensor] = torch.load(job.save_weights, weights_only=True)
    return state


def assert_same_weights(one: Job, other: Job) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), (one.model, name)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "replicas", "cases"),
    [
        pytest.param("1f1b", 1, (2, 1), CASES[:1], id="1f1b 2-1 one"),
        pytest.param("1f1b", 1, (2, 1), CASES, id="1f1b 2-1", marks=pytest.mark.slow),
        pytest.param("1f1b", 1, (1, 1), CASES, id="1f1b 1-1", marks=pytest.mark.slow),
        pytest.param("gpipe", 3, (1, 1), CASES, id="gpipe 1-1", marks=pytest.mark.slow),
        pytest.param("1f1b-flush", 4, (1, 2), CASES, id="1f1b-flush 1-2", marks=pytest.mark.slow),
        pytest.param("2bw", 2, (1, 1), CASES, id="2bw 1-1", marks=pytest.mark.slow),
        pytest.param("zb-h1", 3, (1, 1), CASES, id="zb-h1", marks=pytest.mark.slow),
        pytest.param(
            "interleaved", 3, (1, 1, 1, 1), CASES, id="interleaved", marks=pytest.mark.slow
        ),
        pytest.param("zb-v", 3, (1, 1, 1, 1), CASES, id="zb-v", marks=pytest.mark.slow),
        pytest.param("v-half", 3, (1, 1, 1, 1), CASES, id="v-half", marks=pytest.mark.slow),
        pytest.param("v-min", 3, (1, 1, 1, 1), CASES, id="v-min", marks=pytest.mark.slow),
    ],
)
def test_going_on_equals_not_having_stopped(
    schedule: str,
    microbatches: int,
    replicas: Sequence[int],
    cases: Sequence[tuple[str, str]],
    tmp_path: Path,
) -> None:
    """Losses and weights; momentum, AdamW's moments and step counts, BatchNorm, dropout, the place
    in the data.
    """
    whole, before, after = [], [], []
    for model, optimizer in cases:
        path = write_model(tmp_path, model, optimizer)
        profile = structural_profile(path, BATCH_SIZE)
        chunks = len(replicas) // 2  # of each of two workers
        plan = make_plan(profile, replicas, schedule, microbatches, chunks=chunks)
        whole.append(job_of(path, plan, tmp_path, "whole", 13))
        before.append(job_of(path, plan, tmp_path, "stopped", 7))
        after.append(job_of(path, plan, tmp_path, "stopped", 13, resume="auto"))
    results = run_jobs([*whole, *before, *after], tmp_path)
    for index, job in enumerate(whole):
        one, first, second = results[index :: len(cases)]
        assert second.first_minibatch == 7
        assert losses(one) == losses(first) + losses(second)
        assert_same_weights(job, after[index])


SCHEDULER = """
def scheduler(optimizer):
    from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR
    return SequentialLR(
        optimizer, [LinearLR(optimizer, 0.2, total_iters=5), StepLR(optimizer, 2)], milestones=[5]
    )
"""
# A loss so large that the first scales of float16 overflow.
STEEP = """
def loss(output, target):
    return 200 * nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1e-4)
"""


@dataclass(frozen=True)
class Kept:
    """A run on two workers with something more to keep."""

    model: str
    schedule: str
    microbatches: int = 1
    more: str = SCHEDULER
    options: TrainingOptions = field(default_factory=TrainingOptions)
    float16: bool = False

    def jobs(self, folder: Path) -> tuple[Job, Job, Job]:
        """The whole run, the run up to the checkpoint, and what follows it."""
        folder.mkdir()
        path = write_model(folder, self.model, "momentum", more=self.more)
        profile = structural_profile(
            path, BATCH_SIZE, ModuleOptions(torch.float16) if self.float16 else PLAIN
        )
        plan = make_plan(profile, (1, 1), self.schedule, self.microbatches)
        whole, stopped = (job_of(path, plan, folder, name, 13) for name in ("whole", "stopped"))
        checkpoints = replace(stopped.checkpoints, resume="auto")
        options = {"options": self.options}
        return (
            whole.model_copy(update=options),
            stopped.model_copy(update=options | {"steps": 7}),
            stopped.model_copy(update=options | {"checkpoints": checkpoints}),
        )


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([Kept("convolutional", "2bw", 2)], id="one"),
        pytest.param(
            [
                Kept("language", "1f1b"),
                Kept("language", "1f1b-flush", 2, more=STEEP, float16=True),
            ],
            id="some",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                Kept("convolutional", "zb-h1", 3),
                Kept("blocks", "gpipe", 2),
                Kept("language", "1f1b", options=TrainingOptions(clip_grad_norm=0.5)),
                Kept("language", "1f1b", more=STEEP, float16=True),
                Kept("language", "2bw", 2, more=STEEP + SCHEDULER, float16=True),
            ],
            id="others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_whatever_a_run_keeps_goes_on(cases: Sequence[Kept], tmp_path: Path) -> None:
    """Learning rate schedules, float16's loss scales, BatchNorms."""
    jobs = [case.jobs(tmp_path / str(index)) for index, case in enumerate(cases)]
    results = run_jobs(
        [job for order in range(3) for job in (each[order] for each in jobs)], tmp_path
    )
    for index, (case, (whole, stopped, after)) in enumerate(zip(cases, jobs, strict=True)):
        one, first, second = results[index :: len(cases)]
        assert second.first_minibatch == 7
        assert losses(one) == losses(first) + losses(second), case
        assert_same_weights(whole, after)
        saved = load_checkpoint(complete(Path(stopped.checkpoints.checkpoint_folder))[0])
        kept = [part.extras for part in saved.index.parts]
        assert all(("scheduler" in extras) == ("scheduler" in case.more) for extras in kept)
        if case.float16:
            scales = [from_json(extras["loss scale"])["scale"] for extras in kept]
            assert all(scale < FIRST_SCALE for scale in scales), "some scales had overflowed"


def losses(result: TrainResult) -> list[tuple[int, float | None]]:
    return [(entry.minibatch, entry.loss) for entry in result.losses]
