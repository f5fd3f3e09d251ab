"""Batches whose lengths vary train as in one process, which knows nothing of stages, captures and
messages.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.executor.run.data import make_batches
from planner.formats.plan import Plan, save_plan
from planner.formats.plan_parts import PlannedLengths
from planner.formats.profile import Profile
from planner.formats.timeline import load_timeline
from planner.model.batch import Batch
from planner.model.loss import loss_of
from planner.model.spec import load_model_file
from planner.options.training import CheckpointOptions, RunOptions, TrainingOptions
from planner.schedule.instructions import Unit
from planner.schedule.registry import find
from planner.workers.job import Job
from tests.executor.plans import in_groups, make_plan, sharded, structural_profile
from tests.executor.processes import TIMEOUT_S, run_jobs
from tests.executor.run.test_exactness import recomputing
from tests.executor.varying import (
    CAUSAL,
    MODELS,
    SAMPLES,
    SEED,
    SIZE,
    Reference,
    assert_equals_one_process,
    by_labels,
    train,
    write,
)

# Schedules, replicas per stage, microbatches.
CASES: list[tuple[str, tuple[int, ...], int]] = [
    ("1f1b", (1, 1), 1),
    ("1f1b-flush", (1, 1), 3),
    ("1f1b-flush", (2,), 4),
    ("gpipe", (1, 1), 3),
    ("2bw", (1, 1), 3),
    ("zb-h1", (1, 1), 3),
    ("zb-v", (1,) * 4, 3),
    ("interleaved", (1,) * 4, 4),
    ("1f1b", (2, 1, 1), 1),
    ("1f1b", (1, 3), 1),
    ("1f1b-flush", (2, 2), 4),
    ("1f1b-flush", (1,) * 4, 3),
    ("gpipe", (1,) * 4, 3),
    ("2bw", (2, 1, 1), 4),
    ("zb-h1", (1,) * 4, 3),
    ("zb-v", (1,) * 8, 4),
    ("interleaved", (1,) * 8, 4),
]


def plans_of(profile: Profile, workers: int, *, shares: bool = False) -> list[Plan]:
    """Of all schedules on so many workers, and with recomputed layers and divided optimizers.

    Stages that share weights must have as many minibatches in flight as each other where each
    updates by itself.
    """
    plans = []
    for schedule, replicas, microbatches in CASES:
        chunks, depths = 2 if find(schedule).chunked else 1, None
        if sum(replicas) // chunks != workers:
            continue
        if shares and find(schedule).stashes:
            replicas, depths = (1,) * workers, (workers,) * workers
        plans.append(
            by_labels(make_plan(profile, replicas, schedule, microbatches, depths, chunks))
        )
    named = {(plan.schedule.name, plan.replicas): plan for plan in plans}
    if workers == 2:
        plans.append(recomputing(named["1f1b-flush", (1, 1)], (True, 2)))
    else:
        plans.append(sharded(named["1f1b-flush", (2, 2)]))
    return plans


FEW = 2  # plans of a default run
LONG = pytest.mark.timeout(900)  # four workers capture a model ten times
TOGETHER = 4  # plans that one set of processes trains, which has a time-out


@pytest.mark.parametrize(
    ("model", "workers", "few"),
    [
        pytest.param("gnmt", 2, True, id="gnmt 2 few"),
        pytest.param("packed", 4, True, id="packed 4 few", marks=pytest.mark.slow),
        *(
            pytest.param(
                model, workers, False, id=f"{model} {workers}", marks=[pytest.mark.slow, LONG]
            )
            for model in MODELS
            for workers in (2, 4)
        ),
    ],
)
def test_losses_and_weights_equal_one_process(
    model: str, workers: int, few: bool, tmp_path: Path
) -> None:
    """The last minibatch of an epoch is smaller, and some of its microbatches have no sample."""
    if model == "t5":
        pytest.importorskip(
            "transformers", reason="needs the extra 'hf': pip install 'transformers>=4.50'"
        )
    path, minibatches = write(tmp_path, model), 10
    profile = structural_profile(path, SIZE)
    plans = plans_of(profile, workers, shares=model == "t5")[: FEW if few else None]
    for start in range(0, len(plans), TOGETHER):
        some = plans[start : start + TOGETHER]
        jobs = [Job(model=str(path), plan=plan, steps=minibatches, seed=SEED) for plan in some]
        for plan, trained in zip(some, train(tmp_path, jobs), strict=True):
            assert_equals_one_process(path, profile, plan, trained, minibatches)


def test_groups_of_ranks_that_divide_layers(tmp_path: Path) -> None:
    path = write(tmp_path, "causal")
    profile = structural_profile(path, SIZE)
    plan = by_labels(make_plan(profile, (1, 1), "1f1b-flush", 3))
    (trained,) = train(
        tmp_path, [Job(model=str(path), plan=in_groups(plan, 2), steps=5, seed=SEED)]
    )
    assert_equals_one_process(path, profile, plan, trained, 5)


def test_evaluation_and_resuming_within_an_epoch(tmp_path: Path) -> None:
    """The second run begins in the middle of the buckets of the first."""
    path = tmp_path / "causal.py"
    more = """
from planner.model.samplers import BucketSampler

def sampler(microbatch_size, microbatches, seed):
    return BucketSampler(
        [len(sample(number)) for number in range(SAMPLES)], microbatch_size, microbatches, seed=seed
    )
"""
    path.write_text((CAUSAL + more).replace("SAMPLES", str(SAMPLES)), encoding="utf-8")
    profile = structural_profile(path, SIZE)
    plan = by_labels(make_plan(profile, (1, 1), "1f1b-flush", 3))
    options = TrainingOptions(evaluate_every=3)
    checkpoints = CheckpointOptions(
        checkpoint_folder=str(tmp_path / "saved"), checkpoint_every=4, keep=9
    )
    whole = Job(model=str(path), plan=plan, steps=11, seed=SEED, options=options)
    first = whole.model_copy(update={"steps": 4, "checkpoints": checkpoints})
    second = whole.model_copy(
        update={"checkpoints": CheckpointOptions(resume=str(tmp_path / "saved"))}
    )
    (one, weights), _, (rest, resumed) = train(tmp_path, [whole, first, second])
    assert [entry.loss for entry in one.losses[4:]] == [entry.loss for entry in rest.losses]
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights.items())

    reference = Reference(path, plan, profile)
    spec, counted, total = reference.spec, 0, 0.0
    reference.train(11)
    data = spec.evaluation_dataset()
    with torch.no_grad():
        for start in range(0, 14, SIZE):
            batch = spec.collate([data[index] for index in range(start, start + SIZE)])
            labels = int((batch.target != -100).sum())
            total += float(loss_of(reference.model(*batch.args), batch.target, spec.loss)) * labels
            counted += labels
    assert [each.minibatch for each in one.evaluations] == [3, 6, 9, 11]
    assert one.evaluations[-1].loss == pytest.approx(total / counted, rel=1e-9)


def test_a_trace_has_the_lengths_of_microbatches(tmp_path: Path) -> None:
    """By the names of lengths(), also of those that another worker ran."""
    path = write(tmp_path, "translator")
    plan = by_labels(make_plan(structural_profile(path, SIZE), (2, 1), "1f1b-flush", 4))
    options = RunOptions(trace="any", trace_minibatches=3)
    run_jobs([Job(model=str(path), plan=plan, steps=6, seed=SEED, run_options=options)], tmp_path)
    timeline = load_timeline(tmp_path / "job-0.json.timeline")
    assert timeline.length_names == ("source", "target")
    data = make_batches(load_model_file(str(path)), SIZE, 4, SEED)
    units = [Unit(minibatch, number) for minibatch in range(3, 6) for number in range(4)]
    batches = [data.batch(unit) for unit in units]
    sizes = [tuple(tensor.shape[1] for tensor in batch.args) for batch in batches]
    assert timeline.lengths == tuple(
        (*unit, *pair) for unit, pair in zip(units, sizes, strict=True)
    )


def test_a_length_beyond_the_greatest_ends_the_run_before_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    source = CAUSAL.replace("SAMPLES", "8").replace('"words": (3, 12)', '"words": (3, 10)')
    path.write_text(source, encoding="utf-8")
    plan = by_labels(make_plan(structural_profile(path, SIZE), (1, 1), "1f1b-flush", 2))
    with pytest.raises(
        AssertionError, match=r"has a length of 1[12] in dimension 1 of its tensor 0.* is 3 to 10"
    ):
        run_jobs([Job(model=str(path), plan=plan, steps=2, seed=SEED)], tmp_path)


def test_a_run_warns_once_of_lengths_that_the_plan_was_not_made_for(tmp_path: Path) -> None:
    path = write(tmp_path, "causal")
    plan = by_labels(make_plan(structural_profile(path, SIZE), (1, 1), "1f1b-flush", 2))
    data = make_batches(load_model_file(str(path)), SIZE, 2, SEED)
    words = [
        data.batch(Unit(minibatch, number)).args[0].shape[1]
        for minibatch in range(15)
        for number in range(2)
    ]
    jobs = []
    for lengths in (words, [4, 5]):
        rows = tuple((each,) for each in lengths)
        made_for = PlannedLengths(
            names=("words",), least=(3,), most=(12,), order="random", microbatches=rows
        )
        own = plan.model_copy(update={"lengths": made_for})
        jobs.append(Job(model=str(path), plan=own, steps=20, seed=SEED))
    run_jobs(jobs, tmp_path)
    warnings = [
        line
        for line in (tmp_path / "workers.log").read_text("utf-8").splitlines()
        if "was made for" in line
    ]
    assert len(warnings) == 1
    assert re.search(
        r"the mean length 'words' of microbatches is \d+\.\d, and the plan was made for 4\.5;",
        warnings[0],
    )


OWN_LOOP = """
import json, os, torch, planner

torch.set_num_threads(1)
spec = planner.load_model_file("causal.py")
generator = torch.Generator().manual_seed(5)

def batch(size, words):
    tokens = torch.randint(1, 23, (size, words + 1), generator=generator)
    return (tokens[:, :-1],), tokens[:, 1:]

plan = planner.load_plan("plan.json")
with planner.pipeline(plan, "causal.py", seed=SEED, evaluates=True) as pipeline:
    for words in (5, 12, 3, 9):
        pipeline.step(batch(6, words))
    pipeline.drain()
    evaluations = [pipeline.evaluate([batch(2, a), batch(2, b)]).loss for a, b in ((4, 11), (8, 3))]
    if os.environ["RANK"] == "0":
        with open("report.json", "w") as file:
            json.dump([list(pipeline.losses.values()), evaluations], file)
    pipeline.step(batch(6, 13))
"""


def test_a_loop_of_the_users_own(tmp_path: Path) -> None:
    path = write(tmp_path, "causal")
    save_plan(
        make_plan(structural_profile(path, 2), (1, 1), "1f1b-flush", 3), tmp_path / "plan.json"
    )
    (tmp_path / "script.py").write_text(OWN_LOOP.replace("SEED", str(SEED)), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "script.py",
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path.cwd()),
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert "minibatch 4 has a length of 13 in dimension 1" in done.stderr, done.stderr
    losses, evaluations = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))

    spec = load_model_file(str(path))
    torch.manual_seed(SEED)
    model = spec.build_model()
    generator = torch.Generator().manual_seed(5)

    def batch(size: int, words: int) -> Batch:
        tokens = torch.randint(1, 23, (size, words + 1), generator=generator)
        return Batch((tokens[:, :-1],), target=tokens[:, 1:])

    def whole_loss(batch: Batch) -> Tensor:
        return loss_of(model(*batch.args), batch.target, spec.loss)

    optimizer, expected = spec.optimizer(model.parameters()), []
    for words in (5, 12, 3, 9):
        optimizer.zero_grad()
        loss = whole_loss(batch(6, words))
        torch.autograd.backward(loss)
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-9)
    with torch.no_grad():
        means = [
            [float(whole_loss(batch(2, words))) for words in pair] for pair in ((4, 11), (8, 3))
        ]
    assert evaluations == pytest.approx([sum(pair) / 2 for pair in means], rel=1e-9)
