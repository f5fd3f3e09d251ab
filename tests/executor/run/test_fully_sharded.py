"""Replicas that divide gradients and weights train as one process does, to rounding: sums have
another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch

from planner.executor.checkpoint.folders import complete, load_checkpoint
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.options import PLAIN, ModuleOptions
from planner.options.training import CheckpointOptions, TrainingOptions
from planner.workers.job import Job, TrainResult
from tests.executor.models import EVALUATION, write_model
from tests.executor.plans import make_plan, sharded, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.run.test_sharded_optimizer import GROUPS, SCHEDULER, STEEP

BATCH_SIZE, SEED, STEPS = 4, 3, 5


@dataclass(frozen=True)
class Case:
    """A run of one stage at a level."""

    level: int
    model: str = "language"
    optimizer: str = "adamw"
    schedule: str = "1f1b-flush"
    recompute: str = "none"
    more: str = ""
    options: TrainingOptions = field(default_factory=TrainingOptions)
    numbers: ModuleOptions = PLAIN
    samples: int | None = None
    exact: bool = True  # to rounding of float32
    group: int | None = None  # replicas that divide it between them; all where it is None

    def job(self, folder: Path, replicas: int, microbatches: int) -> Job:
        folder.mkdir(exist_ok=True)
        path = write_model(folder, self.model, self.optimizer, samples=self.samples, more=self.more)
        plan = make_plan(_profile(path, self.numbers), (replicas,), self.schedule, microbatches)
        plan = recomputing(
            sharded(plan, self.level, self.group) if replicas > 1 else plan, self.recompute
        )
        weights = folder / f"{replicas}.pt"
        return Job(
            model=str(path),
            plan=plan,
            steps=STEPS,
            seed=SEED,
            save_weights=str(weights),
            options=self.options,
        )


@cache
def _profile(path: Path, options: ModuleOptions) -> Profile:
    return structural_profile(path, BATCH_SIZE, options)


def recomputing(plan: Plan, what: str) -> Plan:
    """The plan with its stage recomputing as a whole, or the first layers and then some more, each
    by themselves.
    """
    (stage,) = plan.stages
    if what == "none":
        return plan
    groups = True if what == "all" else (stage.layers[:2], stage.layers[3:5])
    changed = stage.model_copy(
        update={"recompute": groups, "recompute_s": None if groups is True else 1.0}
    )
    return plan.model_copy(update={"stages": (changed,)})


def compare(cases: Sequence[Case], replicas: int, each: int, folder: Path) -> None:
    alone, together = (
        [
            case.job(folder / str(number), count, replicas * each)
            for number, case in enumerate(cases)
        ]
        for count in (1, replicas)
    )
    results = zip(run_jobs(alone, folder), run_jobs(together, folder), strict=True)
    for case, one, other, (expected, found) in zip(cases, alone, together, results, strict=True):
        tolerance = 1e-5 if case.exact else 2e-2
        assert losses(found) == pytest.approx(losses(expected), rel=tolerance), case
        evaluated = [
            [(each.loss, each.metrics) for each in result.evaluations]
            for result in (expected, found)
        ]
        for before, after in zip(*evaluated, strict=True):
            assert after[0] == pytest.approx(before[0], rel=tolerance), case
        weights = [torch.load(str(job.save_weights), weights_only=True) for job in (one, other)]
        assert weights[0].keys() == weights[1].keys()
        for name, tensor in weights[0].items():
            if name.rpartition(".")[2] in STATISTICS:  # each replica's are of its own microbatches
                continue
            torch.testing.assert_close(
                weights[1][name],
                tensor,
                rtol=1e-3,
                atol=2e-5 if case.exact else 2e-2,
                msg=f"{case} {name}",
            )


def losses(result: TrainResult) -> list[float | None]:
    return [entry.loss for entry in result.losses]


FROZEN = """
def build_model():
    model = Net()
    model.embed.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model
"""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
CLIPPED = TrainingOptions(clip_grad_norm=0.3)
EVALUATED = TrainingOptions(evaluate_every=2)
HALF, BFLOAT = ModuleOptions(torch.float16), ModuleOptions(torch.bfloat16)

TWO = [
    Case(2),
    Case(3, recompute="some"),
    Case(2, "tied", schedule="gpipe", options=CLIPPED, more=SCHEDULER),
    Case(3, "tied", schedule="gpipe", recompute="all", options=CLIPPED),
    Case(3, more=GROUPS),
    Case(3, more=FROZEN, optimizer="momentum"),
    Case(2, "convolutional"),
    Case(3, "convolutional", recompute="some"),
    Case(3, "blocks", recompute="some"),
    Case(3, "experts", exact=False),
]
# A last minibatch has microbatches of 4, 4, 4 and 3 samples; of 1, 1, 1 and none; and of one for a
# single replica.
ENDS = [
    Case(2, "tied", samples=31, more=EVALUATION, options=EVALUATED),
    Case(3, "tied", samples=19, more=EVALUATION, options=EVALUATED),
    Case(3, samples=17, recompute="some", more=EVALUATION, options=EVALUATED),
]
MIXED = [
    Case(2, numbers=HALF, more=STEEP, exact=False),
    Case(3, numbers=BFLOAT, recompute="some", exact=False),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(TWO[2:5:2], id="some kinds"),
        pytest.param([TWO[0], *TWO[6::2]], id="more kinds", marks=pytest.mark.slow),
        pytest.param(ENDS[1:2], id="an end", marks=pytest.mark.slow),
        pytest.param(MIXED[1:], id="bfloat16"),
        pytest.param(MIXED[:1], id="float16", marks=pytest.mark.slow),
        pytest.param(TWO[1::2], id="the other kinds", marks=pytest.mark.slow),
        pytest.param(ENDS[::2], id="the other ends", marks=pytest.mark.slow),
    ],
)
def test_two_replicas_train_as_one_process(cases: Sequence[Case], tmp_path: Path) -> None:
    compare(cases, 2, 2, tmp_path)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([Case(3, "tied")], id="some kinds"),
        pytest.param(
            [Case(2), Case(3, "convolutional")], id="the other kinds", marks=pytest.mark.slow
        ),
    ],
)
def test_four_replicas_train_as_one_process(cases: Sequence[Case], tmp_path: Path) -> None:
    compare(cases, 4, 1, tmp_path)


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param((3, None, 3), id="some"),
        pytest.param((3, None, 2, 1, 3), id="all", marks=pytest.mark.slow),
    ],
)
def test_any_plan_goes_on_where_another_stopped(
    levels: Sequence[int | None], tmp_path: Path
) -> None:
    """From weights that are divided to a pipeline (None), to gradients, an optimizer, and weights
    that are divided.
    """
    path = write_model(tmp_path, "tied", "adamw", more=SCHEDULER)
    whole, cut = (
        make_plan(_profile(path, PLAIN), replicas, "1f1b-flush", 4) for replicas in ((2,), (1, 1))
    )
    course = [cut if level is None else sharded(whole, level) for level in levels]
    job = Job(
        model=str(path),
        plan=whole,
        steps=2 * len(course),
        seed=SEED,
        save_weights=str(tmp_path / "whole.pt"),
    )
    jobs = [job]
    for number, plan in enumerate(course):
        checkpoints = CheckpointOptions(
            checkpoint_folder=str(tmp_path / "checkpoints"),
            checkpoint_every=2,
            resume="auto" if number else None,
        )
        changed = {"plan": plan, "steps": 2 * (number + 1), "checkpoints": checkpoints}
        jobs.append(
            job.model_copy(update=changed | {"save_weights": str(tmp_path / f"{number}.pt")})
        )
    expected, *rest = run_jobs(jobs, tmp_path)
    assert [result.first_minibatch for result in rest] == [2 * each for each in range(len(course))]
    assert [loss for result in rest for loss in losses(result)] == pytest.approx(
        losses(expected), rel=1e-5
    )
    one, other = (
        torch.load(str(job.save_weights), weights_only=True) for job in (jobs[0], jobs[-1])
    )
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=2e-5)
    newest = load_checkpoint(complete(tmp_path / "checkpoints")[-1])
    sizes = [
        part.optimizer_file.size_bytes
        for part in newest.index.parts
        if part.optimizer_file is not None
    ]
    assert len(sizes) == 2
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2), "each replica has half of the state"
