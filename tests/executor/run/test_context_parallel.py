"""Ranks that divide sequences train as one process does, to rounding, whatever the schedule.

Models are in float64, where rounding is far from what a wrong gradient, a wrong position or another
dropout mask would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from planner.errors import PlanError
from planner.executor.run.stages import tensor_group
from planner.formats.plan import Plan
from planner.options.training import CheckpointOptions, TrainingOptions
from planner.workers.job import Job
from tests.executor.models import DATASET, OPTIMIZERS, SHARED_HEAD, write_model
from tests.executor.plans import by_sequences, in_groups, make_plan, sharded, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.run.test_exactness import recomputing
from tests.executor.run.test_tensor_parallel import EVALUATION, Reference, assert_close

BATCH_SIZE = 4
SEED = 3
STEPS = 6

# Rotary embeddings, learned positions, a mask as a tensor with a weight in it, keys of fewer heads
# that are repeated, a norm over the whole sequence, and a loss within the model: of the next token,
# where some labels do not count.
LLAMA = """
import torch
import torch.nn.functional as F
from torch import nn

def turned(x):
    return torch.cat((-x[..., 2:], x[..., :2]), -1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.RMSNorm(16), nn.LayerNorm((8, 16))
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.near = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, cos, sin, mask):
        h = self.before(x)
        made = (each(h) for each in (self.query, self.key, self.value))
        q, k, v = (each.view(x.shape[0], 8, -1, 4).transpose(1, 2) for each in made)
        q, k = (each * cos + turned(each) * sin for each in (q, k))
        k, v = (
            each[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, 8, 4)
            for each in (k, v)
        )
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask + self.near * mask.exp())
        x = x + self.out(a.transpose(1, 2).reshape(x.shape[0], 8, 16))
        return x + self.down(F.silu(self.up(self.between(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.places = nn.Parameter(torch.randn(1, 12, 16))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places[:, :8]
        place = torch.arange(8, device=tokens.device)
        angle = place[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1], dtype=x.dtype)
        far = (place[:, None] < place).to(x.dtype) * -30 - (place[:, None] - place).abs() / 10
        for block in self.blocks:
            x = block(x, angle.cos(), angle.sin(), far[None, None])
        return self.head(x)

def build_model():
    return Net().double()

def example_batch(batch_size):
    tokens = torch.randint(0, 20, (batch_size, 8))
    return (tokens,), torch.where(tokens % 5 == 0, -100, tokens)

def loss(output, target):
    kept, labels = output[:, :-1].flatten(0, 1), target[:, 1:].flatten()
    return F.cross_entropy(kept, labels) + 1e-3 * output.square().mean()

def optimizer(parameters):
    return OPTIMIZER
"""


class Case(NamedTuple):
    """A run, on two ranks for each replica of each stage."""

    model: str
    replicas: tuple[int, ...]
    schedule: str = "1f1b-flush"
    microbatches: int = 2


# of labels that do not count no two microbatches of `llama` have equally many, so there is one
TWO = [
    Case("attention", (1,)),
    Case("packed", (1,)),
    Case("flattened", (1,)),
    Case("llama", (1,), microbatches=1),
]
FOUR = [
    Case("attention", (1, 1), microbatches=3),
    Case("attention", (1, 1), "1f1b", 1),
    Case("llama", (1, 1), microbatches=1),
    Case("tied head", (1, 1)),
    Case("attention", (2,)),
    Case("packed", (2,), "1f1b", 1),
    Case("packed", (1, 1), "zb-h1", 3),
    Case("packed", (1, 1), "2bw", 3),
    Case("flattened", (1, 1), "gpipe", 3),
]


def model_file(folder: Path, model: str) -> Path:
    """Write the model file with a dataset, and return its path."""
    if model != "llama":
        return write_model(folder, model, "momentum", samples=1000)
    path = folder / "llama.py"
    source = LLAMA.replace("OPTIMIZER", OPTIMIZERS["momentum"])
    path.write_text(source + DATASET.replace("SAMPLES", "1000"), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(TWO, id="one stage"),
        pytest.param(FOUR[:4], id="two stages"),
        pytest.param(FOUR[4:], id="more", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_divide_sequences_train_as_one_process(
    cases: Sequence[Case], tmp_path: Path
) -> None:
    jobs = []
    for number, case in enumerate(cases):
        path = model_file(tmp_path, case.model)
        costs = structural_profile(path, BATCH_SIZE)
        plan = by_sequences(make_plan(costs, case.replicas, case.schedule, case.microbatches), 2)
        saved = str(tmp_path / f"{number}.pt")
        jobs.append(Job(model=str(path), plan=plan, steps=STEPS, seed=SEED, save_weights=saved))
    for job, result in zip(jobs, run_jobs(jobs, tmp_path), strict=True):
        reference = Reference(Path(job.model), job.plan.microbatches)
        losses, expected = reference.train(job.plan, STEPS)
        assert result.context == 2
        assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-10)
        weights = torch.load(str(job.save_weights), weights_only=True)
        assert_close(weights, expected, 1e-10, 1e-12)


def test_replicas_without_a_microbatch_do_not_mix_the_gradients_of_their_stages(
    tmp_path: Path,
) -> None:
    """The stages of a worker are all-reduced among the same ranks, and a replica that has nothing
    to do comes to them in another order than one whose second stage recomputes.
    """
    path = write_model(tmp_path, "packed", "momentum")
    plan = make_plan(structural_profile(path, BATCH_SIZE), (2, 2), "zb-v", 1, chunks=2)
    plan = by_sequences(recomputing(plan, (False, 2)), 2)
    saved = str(tmp_path / "weights.pt")
    job = Job(model=str(path), plan=plan, steps=STEPS, seed=SEED, save_weights=saved)
    (result,) = run_jobs([job], tmp_path)

    losses, expected = Reference(path, 1).train(plan, STEPS)
    assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-10)
    assert_close(torch.load(saved, weights_only=True), expected, 1e-10, 1e-12)


BESIDE: dict[str, dict[str, Any]] = {
    "clipped apart": {"schedule": "1f1b", "options": TrainingOptions(clip_grad_norm=0.3)},
    "clipped together": {"options": TrainingOptions(clip_grad_norm=0.3)},
    "evaluated": {"options": TrainingOptions(evaluate_every=4), "more": EVALUATION},
    "recomputed": {"recompute": True},
    "interleaved": {"schedule": "interleaved", "stages": 4},
    "tied": {"more": SHARED_HEAD},
}


@pytest.mark.slow
def test_what_a_run_may_do_beside_training_is_as_with_whole_sequences(tmp_path: Path) -> None:
    """Norms count every gradient once, evaluation and losses are told once, and a checkpoint goes
    on without groups.
    """
    runs = []
    for ranks in (1, 2):
        jobs = []
        for name, case in BESIDE.items():
            folder = tmp_path / f"{name} {ranks}"
            folder.mkdir()
            path = write_model(folder, "attention", "adamw", samples=32, more=case.get("more", ""))
            stages = case.get("stages", 2)
            schedule = case.get("schedule", "1f1b-flush")
            costs = structural_profile(path, BATCH_SIZE)
            microbatches = 1 if schedule == "1f1b" else 4
            plan = make_plan(costs, (1,) * stages, schedule, microbatches, chunks=stages // 2)
            if case.get("recompute"):
                plan = recomputing(plan, (True, 2))
            jobs.append(
                Job(
                    model=str(path),
                    plan=by_sequences(plan, ranks) if ranks > 1 else plan,
                    steps=8,
                    seed=SEED,
                    save_weights=str(folder / "weights.pt"),
                    options=case.get("options", TrainingOptions()),
                )
            )
        runs.append([*zip(jobs, run_jobs(jobs, tmp_path), strict=True)])
    for (one_job, one), (two_job, two) in zip(*runs, strict=True):
        expected = [each.loss for each in one.losses]
        assert [each.loss for each in two.losses] == pytest.approx(expected, rel=1e-9)
        assert len(two.evaluations) == len(one.evaluations)
        assert [each.loss for each in two.evaluations] == pytest.approx(
            [each.loss for each in one.evaluations], rel=1e-9
        )
        found = torch.load(str(two_job.save_weights), weights_only=True)
        whole = torch.load(str(one_job.save_weights), weights_only=True)
        assert_close(found, whole, 1e-7, 1e-9)


@pytest.mark.slow
def test_checkpoints_go_from_divided_sequences_to_whole_ones_and_back(tmp_path: Path) -> None:
    path = write_model(tmp_path, "packed", "momentum", samples=1000)
    costs = structural_profile(path, BATCH_SIZE)
    plans = [
        by_sequences(make_plan(costs, (1, 1), "1f1b-flush", 2), 2),
        make_plan(costs, (2, 2), "1f1b-flush", 2),
        by_sequences(make_plan(costs, (1,), "1f1b-flush", 2), 4),
    ]
    folder = str(tmp_path / "checkpoints")
    jobs = []
    for number, plan in enumerate(plans):
        options = CheckpointOptions(
            checkpoint_every=4, checkpoint_folder=folder, resume="auto" if number else None
        )
        steps = 4 * (number + 1)
        jobs.append(Job(model=str(path), plan=plan, steps=steps, seed=SEED, checkpoints=options))
    results = run_jobs(jobs, tmp_path)
    losses, _ = Reference(path, 2).train(plans[0], 4 * len(plans))
    found = [entry.loss for result in results for entry in result.losses]
    assert found == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: in_groups(plan, 4), "in groups of 4 ranks, which divide layers as well"),
        (lambda plan: sharded(plan), "of replicas that shard their optimizer's state"),
        (lambda plan: plan.model_copy(update={"by_samples": True}), "whose experts ranks shard"),
    ],
    ids=["layers", "optimizer", "experts"],
)
def test_what_else_a_plan_divides_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    path = write_model(tmp_path, "attention", "sgd")
    whole: Plan = make_plan(structural_profile(path, BATCH_SIZE), (2, 1), "1f1b-flush", 2)
    plan = change(by_sequences(whole, 2))
    with pytest.raises(PlanError, match=words) as refused:
        tensor_group(plan, 0)
    assert "does not shard sequences" in str(refused.value)
    assert "over 2 ranks (context parallelism)" in str(refused.value)
    assert "system=torchtitan" in str(refused.value.hint)
