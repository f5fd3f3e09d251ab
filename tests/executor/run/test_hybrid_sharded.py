"""Groups of replicas that divide weights and repeat each other train as one process does, to
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from planner.executor.checkpoint.folders import complete, load_checkpoint
from planner.model.options import PLAIN, ModuleOptions
from planner.options.training import CheckpointOptions
from planner.workers.job import Job
from tests.executor.models import EVALUATION, write_model
from tests.executor.plans import make_plan, sharded
from tests.executor.processes import run_jobs
from tests.executor.run.test_fully_sharded import (
    CLIPPED,
    EVALUATED,
    FROZEN,
    SEED,
    Case,
    _profile,
    compare,
    losses,
)
from tests.executor.run.test_sharded_optimizer import GROUPS, SCHEDULER, STEEP


@dataclass(frozen=True)
class InGroups(Case):
    """A run of one stage whose replicas divide in groups of two."""

    group: int | None = 2


CASES = [
    InGroups(2, "tied", options=CLIPPED, more=SCHEDULER),
    InGroups(3, recompute="some", options=CLIPPED),
    InGroups(3, "blocks", recompute="some"),
]
MORE = [
    InGroups(2),
    InGroups(3, "tied", schedule="gpipe", recompute="all", options=CLIPPED),
    InGroups(3, more=GROUPS),
    InGroups(3, more=FROZEN, optimizer="momentum"),
    InGroups(2, "convolutional"),
    InGroups(3, "tied", samples=19, more=EVALUATION, options=EVALUATED),
    InGroups(2, numbers=ModuleOptions(torch.float16), more=STEEP, exact=False),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES[:1], id="one kind"),
        pytest.param(CASES[1:], id="some kinds", marks=pytest.mark.slow),
        *(
            pytest.param([case], id=f"kind {number}", marks=pytest.mark.slow)
            for number, case in enumerate(MORE)
        ),
    ],
)
def test_two_groups_of_two_train_as_one_process(cases: list[Case], tmp_path: Path) -> None:
    compare(cases, 4, 2, tmp_path)


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_any_plan_goes_on_where_groups_stopped(few: bool, tmp_path: Path) -> None:
    """From groups that repeat each other to a pipeline, to weights that all divide, and to groups
    again.
    """
    path = write_model(tmp_path, "tied", "adamw", more=SCHEDULER)
    whole, cut = (
        make_plan(_profile(path, PLAIN), replicas, "1f1b-flush", 4) for replicas in ((4,), (2, 2))
    )
    course = [
        sharded(whole, 3, 2),
        cut,
        sharded(whole, 2, 2),
        sharded(whole, 3),
        sharded(whole, 3, 2),
    ]
    if few:  # from groups to a pipeline and back
        course = [course[0], course[1], course[-1]]
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
    assert len(sizes) == 2, "what the second group repeats is not written again"
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)
