"""Groups of ranks that divide their layers train as one rank does, to rounding, whatever the
schedule.

Models are in float64, where rounding is far from what a wrong gradient, or another dropout mask,
would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import PlanError
from planner.executor.checkpoint.trained_weights import read_trained
from planner.executor.run.data import make_batches
from planner.executor.run.stages import build_modules
from planner.formats.plan import Plan
from planner.formats.plan_parts import Shared
from planner.formats.profile import Profile
from planner.model.capture.capture import capture_file
from planner.model.spec import load_model_file
from planner.model.stage.stage import StageModule, build_stage
from planner.model.tensor.group import TensorGroup
from planner.options.training import CheckpointOptions, TrainingOptions
from planner.plan.rank_groups import plan_of_tensor_rank, sample_parts
from planner.plan.trainable import check_divided
from planner.schedule.instructions import Unit
from planner.workers.job import Job
from tests.executor.models import SHARED_HEAD, write_model
from tests.executor.plans import by_tokens, in_groups, make_plan, sharded, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.reference import Weights, delayed_updates, double_buffered, plain_training
from tests.executor.run.test_exactness import recomputing
from tests.samples import layer, profile

BATCH_SIZE, SEED = 4, 3
TRANSFORMERS = pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
DOUBLE = """
def build_model():
    return Net().double()
"""
PIPELINED = [("1f1b", 1), ("1f1b-flush", 3), ("2bw", 3), ("zb-h1", 3), ("gpipe", 3)]


class Reference:
    """The unsplit model in one process, initialised as the workers do, on the same data with the
    same dropout.
    """

    def __init__(self, path: Path, microbatches: int, ranks: int = 1) -> None:
        self.spec, self.microbatches, self.ranks = load_model_file(str(path)), microbatches, ranks
        torch.manual_seed(SEED)
        model = self.spec.build_model()  # before the batch, which also draws random numbers
        graph = capture_file(self.spec, self.spec.example_batch(BATCH_SIZE), model)
        self.whole = build_stage(graph, [layer.name for layer in graph.layers])
        self.data = make_batches(self.spec, BATCH_SIZE // ranks, microbatches * ranks, SEED)

    def loss(self, model: nn.Module, minibatch: int, microbatch: int = 0) -> Tensor:
        """Return the mean over the parts that ranks have of a microbatch."""
        assert isinstance(model, StageModule)
        losses = []
        for part in range(microbatch * self.ranks, (microbatch + 1) * self.ranks):
            model.set_random_key(SEED, minibatch, part)
            losses.append(model(self.data.batch(Unit(minibatch, part)), {})["loss"])
        return torch.stack(losses).mean()

    def parts(self, model: nn.Module, minibatch: int) -> list[Tensor]:
        return [self.loss(model, minibatch, microbatch) for microbatch in range(self.microbatches)]

    def train(self, plan: Plan, minibatches: int) -> tuple[list[float], Weights]:
        """Return the losses and the weights at the end."""
        make = self.spec.optimizer
        if not plan.schedule.asynchronous:
            return plain_training(self.whole, make, self.parts, minibatches)
        owner = {
            name: layer.name
            for layer in _profile(self.spec.origin).layers
            for name in layer.parameters
        }
        trained = [name for name, _ in self.whole.named_parameters()]
        names = [[name for name in trained if owner[name] in stage.layers] for stage in plan.stages]
        if plan.schedule.divides:
            return double_buffered(
                self.whole, names, plan.replicas, make, self.loss, minibatches, self.microbatches
            )
        return delayed_updates(self.whole, names, plan.replicas, make, self.loss, minibatches)


@cache
def _profile(path: str) -> Profile:
    return structural_profile(Path(path), BATCH_SIZE)


def assert_close(found: Weights, expected: Weights, rtol: float = 1e-7, atol: float = 1e-9) -> None:
    assert found.keys() >= expected.keys()  # a tied weight is saved under all of its names
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [False, True], ids=["by weights", "by tokens"])
@pytest.mark.parametrize(
    ("model", "replicas", "degrees", "schedules", "minibatches"),
    [
        pytest.param("attention", (1,), (2,), [("1f1b", 1)], 20, id="1x2"),
        pytest.param("attention", (1, 1, 1), (1, 2, 1), [("2bw", 3)], 6, id="1-1x2-1"),
        pytest.param(
            "attention",
            (1,),
            (2,),
            [("1f1b-flush", 2), ("2bw", 2)],
            20,
            id="1x2, more",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "attention", (1, 1), (2, 2), PIPELINED, 20, id="1x2-1x2", marks=pytest.mark.slow
        ),
        pytest.param(
            "attention", (1, 1), (2, 1), PIPELINED, 20, id="1x2-1", marks=pytest.mark.slow
        ),
        pytest.param(
            "attention", (2, 1), (1, 2), PIPELINED[:3], 20, id="2-1x2", marks=pytest.mark.slow
        ),
        pytest.param(
            "attention", (1, 1), (4, 2), PIPELINED[:3], 20, id="1x4-1x2", marks=pytest.mark.slow
        ),
        pytest.param("attention", (2,), (2,), PIPELINED[:3], 20, id="2x2", marks=pytest.mark.slow),
        pytest.param(
            "packed", (1,), (2,), [("1f1b", 1)], 6, id="1x2, packed", marks=pytest.mark.slow
        ),
        pytest.param(
            "packed",
            (1, 1, 1),
            (1, 2, 1),
            PIPELINED[:3],
            20,
            id="1-1x2-1, packed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "packed", (2,), (2,), PIPELINED[:3], 20, id="2x2, packed", marks=pytest.mark.slow
        ),
        pytest.param(
            "packed",
            (1, 1),
            (4, 2),
            PIPELINED[:3],
            20,
            id="1x4-1x2, packed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "flattened", (1,), (2,), [("1f1b", 1)], 6, id="1x2, flattened", marks=pytest.mark.slow
        ),
        pytest.param(
            "flattened",
            (1, 2),
            (2, 2),
            PIPELINED[1:3],
            6,
            id="1x2-2x2, flattened",
            marks=pytest.mark.slow,
        ),
        # of two key-value heads
        pytest.param(
            "flattened",
            (1,),
            (4,),
            PIPELINED[1:2],
            6,
            id="1x4, flattened",
            marks=pytest.mark.slow,
        ),
        pytest.param("tied head", (1, 1), (2, 2), PIPELINED[1:2], 6, id="1x2-1x2, tied head"),
        pytest.param(
            "tied head", (1,), (2,), PIPELINED[:3], 20, id="1x2, tied head", marks=pytest.mark.slow
        ),
        pytest.param("gpt2", (1,), (2,), PIPELINED[:3], 20, id="1x2, GPT-2", marks=TRANSFORMERS),
        pytest.param(
            "gpt2", (1, 1), (2, 2), PIPELINED[1:2], 20, id="1x2-1x2, GPT-2", marks=TRANSFORMERS
        ),
        pytest.param(
            "experts", (1,), (2,), [("1f1b", 1)], 6, id="1x2, experts", marks=pytest.mark.slow
        ),
        pytest.param(
            "experts",
            (1, 1),
            (4, 2),
            PIPELINED[:3],
            6,
            id="1x4-1x2, experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "experts", (2,), (2,), PIPELINED[1:3], 6, id="2x2, experts", marks=pytest.mark.slow
        ),
        pytest.param(
            "experts alone",
            (1,),
            (2,),
            [("1f1b", 1), ("1f1b-flush", 2)],
            6,
            id="1x2, experts alone",
        ),
        pytest.param(
            "experts alone",
            (1, 1),
            (2, 2),
            PIPELINED,
            6,
            id="1x2-1x2, experts alone",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "experts alone",
            (2,),
            (2,),
            PIPELINED[1:3],
            6,
            id="2x2, experts alone",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "experts alone",
            (1,),
            (4,),
            PIPELINED[:3],
            6,
            id="1x4, experts alone",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mixtral", (1,), (2,), PIPELINED[:2], 6, id="1x2, Mixtral", marks=TRANSFORMERS
        ),
        pytest.param(
            "mixtral", (1, 1), (2, 2), PIPELINED[1:2], 6, id="1x2-1x2, Mixtral", marks=TRANSFORMERS
        ),
    ],
)
def test_groups_of_ranks_train_as_one_rank_does(
    model: str,
    replicas: tuple[int, ...],
    degrees: tuple[int, ...],
    schedules: Sequence[tuple[str, int]],
    minibatches: int,
    tokens: bool,
    tmp_path: Path,
) -> None:
    """Losses and weights equal those of references that know neither stages nor groups; dropout
    included.
    """
    double, samples = (
        model not in ("experts", "experts alone", "mixtral"),
        model in ("experts alone", "mixtral"),
    )
    path = write_model(tmp_path, model, "momentum", more=DOUBLE if model == "gpt2" else "")
    jobs = []
    for schedule, microbatches in schedules:
        plan = in_groups(make_plan(_profile(str(path)), replicas, schedule, microbatches), *degrees)
        plan = by_tokens(plan) if tokens else plan
        plan = plan.model_copy(update={"by_samples": samples})
        weights = str(tmp_path / f"{schedule}.pt")
        jobs.append(
            Job(model=str(path), plan=plan, steps=minibatches, seed=SEED, save_weights=weights)
        )
    for job, result in zip(jobs, run_jobs(jobs, tmp_path), strict=True):
        reference = Reference(path, job.plan.microbatches, degrees[0] if samples else 1)
        losses, expected = reference.train(job.plan, minibatches)
        assert [entry.loss for entry in result.losses] == pytest.approx(
            losses, rel=1e-7 if double else 1e-4
        )
        if samples:  # each rank has its own
            rates = [
                each.samples_per_s
                for each in result.reports
                if each.rank in job.plan.stages[-1].ranks
            ]
            assert result.samples_per_s == pytest.approx(sum(rates), rel=0.4)
        assert_close(
            torch.load(str(job.save_weights), weights_only=True),
            expected,
            *() if double else (1e-2, 1e-4),
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["attention", "packed"])
def test_checkpoints_go_from_groups_to_single_ranks_and_back(model: str, tmp_path: Path) -> None:
    """Weights and momenta are whole in checkpoints, under their names in the model."""
    path = write_model(tmp_path, model, "momentum", samples=1000)
    costs = _profile(str(path))
    plans = [
        by_tokens(in_groups(make_plan(costs, (1, 1), "1f1b-flush", 2), 2)),
        sharded(make_plan(costs, (2, 2), "1f1b-flush", 2)),
        in_groups(sharded(make_plan(costs, (2,), "1f1b-flush", 2)), 2),
        by_tokens(in_groups(make_plan(costs, (1,), "1f1b-flush", 2), 4)),
        in_groups(sharded(make_plan(costs, (2, 1), "1f1b-flush", 2)), 1, 2),
        make_plan(costs, (1, 1, 2), "1f1b-flush", 2),
    ]
    folder = tmp_path / "checkpoints"
    jobs = []
    for number, plan in enumerate(plans):
        options = CheckpointOptions(
            checkpoint_every=4, checkpoint_folder=str(folder), resume="auto" if number else None
        )
        jobs.append(
            Job(model=str(path), plan=plan, steps=4 * (number + 1), seed=SEED, checkpoints=options)
        )
    results = run_jobs(jobs, tmp_path)
    losses, expected = Reference(path, 2).train(plans[0], 4 * len(plans))
    assert [entry.loss for result in results for entry in result.losses] == pytest.approx(
        losses, rel=1e-7
    )
    assert_close(read_trained(folder), expected)


EVALUATION = """
def evaluation_dataset():
    return Samples(10, seed=8)
"""
DIFFERENT: dict[str, dict[str, Any]] = {
    "clipped apart": {"schedule": "1f1b", "options": TrainingOptions(clip_grad_norm=0.3)},
    "clipped together": {"schedule": "1f1b-flush", "options": TrainingOptions(clip_grad_norm=0.3)},
    "evaluated": {
        "schedule": "1f1b",
        "options": TrainingOptions(evaluate_every=4),
        "more": EVALUATION,
    },
    "recomputed": {"schedule": "1f1b", "recompute": True},
    "interleaved": {"schedule": "interleaved", "stages": 4},
    "zb-v": {"schedule": "zb-v", "stages": 4},
    "tied": {"schedule": "1f1b-flush", "more": SHARED_HEAD},
}


@pytest.mark.slow
def test_what_a_run_may_do_beside_training_is_as_without_groups(tmp_path: Path) -> None:
    """Norms count every gradient once, evaluation and losses are told once, and tied weights step
    alike.
    """
    results = []
    # The degree of the first worker's stages and of the second's, and whether groups divide by
    # tokens, too.
    for first, others, tokens in ((1, 1, False), (2, 2, False), (2, 2, True), (2, 1, True)):
        jobs = []
        for name, case in DIFFERENT.items():
            if name == "tied" and first != others:
                continue
            folder = tmp_path / f"{name} {first} {others} {tokens}"
            folder.mkdir()
            path = write_model(folder, "attention", "adamw", samples=32, more=case.get("more", ""))
            stages, schedule = case.get("stages", 2), case["schedule"]
            divides = 1 if schedule == "1f1b" else 4
            plan = make_plan(
                _profile(str(path)), (1,) * stages, schedule, divides, chunks=stages // 2
            )
            if case.get("recompute"):
                plan = recomputing(plan, (True, 2))
            own = plan.stages[0].ranks
            plan = in_groups(
                plan, *(first if stage.ranks == own else others for stage in plan.stages)
            )
            plan = by_tokens(plan) if tokens else plan
            weights, options = str(folder / "weights.pt"), case.get("options", TrainingOptions())
            jobs.append(
                Job(
                    model=str(path),
                    plan=plan,
                    steps=8,
                    seed=SEED,
                    save_weights=weights,
                    options=options,
                )
            )
        saved = (
            (result, job.save_weights)
            for job, result in zip(jobs, run_jobs(jobs, tmp_path), strict=True)
        )
        results.append(
            [(result, torch.load(str(weights), weights_only=True)) for result, weights in saved]
        )
    expected, *found = results
    for run in found:
        # the last is left out of some
        for (one, weights), (two, divided) in zip(expected, run, strict=False):
            assert [each.loss for each in two.losses] == pytest.approx(
                [each.loss for each in one.losses], rel=1e-6
            )
            assert [each.loss for each in two.evaluations] == pytest.approx(
                [each.loss for each in one.evaluations]
            )
            for name, tensor in weights.items():
                torch.testing.assert_close(divided[name], tensor, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_ranks_with_samples_of_their_own_do_all_that_a_run_may_do(tmp_path: Path) -> None:
    """Evaluation gives every rank all samples, norms count each gradient once, and checkpoints have
    all experts.
    """
    # Four of 36 samples are too few for a minibatch, and left out.
    path = write_model(tmp_path, "experts alone", "momentum", samples=36, more=EVALUATION)
    # Attention would drop values in evaluation, too.
    path.write_text(
        path.read_text(encoding="utf-8").replace("dropout_p=0.1", "dropout_p=0.0"), encoding="utf-8"
    )
    options = TrainingOptions(evaluate_every=4, clip_grad_norm=0.3, drop_last=True)
    one = make_plan(structural_profile(path, 2), (1,), "1f1b-flush", 4)
    divided = in_groups(make_plan(structural_profile(path, 4), (1, 1), "1f1b-flush", 2), 2)
    divided = divided.model_copy(update={"by_samples": True})
    runs = []
    for number, (plan, steps) in enumerate(((one, 8), (divided, 8), (one, 12))):
        folder, weights = (
            str(tmp_path / f"checkpoints {min(number, 1)}"),
            str(tmp_path / f"{number}.pt"),
        )
        job = Job(
            model=str(path),
            plan=plan,
            steps=steps,
            seed=SEED,
            options=options,
            save_weights=weights,
            checkpoints=CheckpointOptions(
                checkpoint_every=4, checkpoint_folder=folder, resume="auto" if number == 2 else None
            ),
        )
        (result,) = run_jobs([job], tmp_path)
        runs.append((result, torch.load(weights, weights_only=True)))
    (expected, whole), (found, gathered), (resumed, _) = runs
    assert [each.loss for each in found.losses] == pytest.approx(
        [each.loss for each in expected.losses], rel=1e-3
    )
    for before, after in zip(expected.evaluations, found.evaluations, strict=True):
        assert after.loss == pytest.approx(before.loss, rel=1e-3)
    assert found.minibatch_size == expected.minibatch_size == 8
    assert [each.minibatch for each in resumed.losses] == list(range(8, 12))
    assert {name: each.shape for name, each in gathered.items()} == {
        n: each.shape for n, each in whole.items()
    }


def test_plans_that_the_executor_cannot_divide_are_refused_before_the_run() -> None:
    plan = in_groups(make_plan(profile(*(layer(name) for name in "abc")), (2, 1)), 2, 1)
    same = plan.stages[0].model_copy(update={"tensor": 1})
    changes: dict[str, dict[str, Any]] = {
        "same ranks whose groups have different sizes": {"stages": (plan.stages[0], same)},
        "share a weight and": {
            "shared": (Shared(stages=(0, 1), weights=("a",), gradient_bytes=4),)
        },
        "of compiled layers": {"compiled": True},
    }
    for message, change in changes.items():
        with pytest.raises(PlanError, match=message):
            check_divided(plan.model_copy(update=change))


def test_tokens_that_ranks_do_not_divide_evenly_are_refused(tmp_path: Path) -> None:
    odd = (
        "\n\ndef example_batch(batch_size):\n    x = torch.randint(0, 20, (batch_size, 7))\n   "
        " return (x,), x\n"
    )
    path = write_model(tmp_path, "attention", "sgd", more=odd)
    plan = by_tokens(in_groups(make_plan(_profile(str(path)), (1,)), 2))
    job = Job(model=str(path), plan=plan, steps=1, seed=SEED)
    with pytest.raises(PlanError, match="2 ranks cannot shard the tokens of any value evenly"):
        build_modules(job, [0], load_model_file(str(path)), "cpu", TensorGroup(2, 0))


def test_ranks_with_samples_of_their_own_are_in_groups(tmp_path: Path) -> None:
    """What one rank sees of a plan does not say into how many parts samples are divided."""
    path = write_model(tmp_path, "experts alone", "momentum")
    plan = make_plan(_profile(str(path)), (1,), "1f1b-flush", 2)
    divided = in_groups(plan, 2).model_copy(update={"by_samples": True})
    assert sample_parts(divided) == 2
    with pytest.raises(PlanError, match="no stage has a group of ranks"):
        sample_parts(plan_of_tensor_rank(divided, 0))
