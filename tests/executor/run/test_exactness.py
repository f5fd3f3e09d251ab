"""Training in real processes over gloo equals references that share nothing with the executor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.executor.run.data import BatchSource, make_batches
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.capture.capture import capture_file
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.stage import StageModule, build_stage
from planner.schedule.instructions import Unit
from planner.schedule.registry import find
from planner.workers.job import Job, TrainResult
from tests.executor.models import MODELS, OPTIMIZERS, write_model
from tests.executor.plans import make_plan, scattered, sharded, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.reference import Weights, delayed_updates, double_buffered, plain_training

pytestmark = pytest.mark.usefixtures("warm_start")

BATCH_SIZE = 4
SEED = 3

Case = tuple[str, str]  # model, optimizer
CASES: list[Case] = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
# every model and every optimizer once
FEW: list[Case] = list(zip(MODELS, OPTIMIZERS, strict=False))


def unsplit(spec: TrainingSpec) -> StageModule:
    """Build the whole model as one stage, initialised as the workers do."""
    torch.manual_seed(SEED)
    model = spec.build_model()  # before the batch, which also draws random numbers
    graph = capture_file(spec, spec.example_batch(BATCH_SIZE), model)
    return build_stage(graph, [layer.name for layer in graph.layers])


def run_cases(
    folder: Path,
    cases: Sequence[Case],
    replicas: tuple[int, ...],
    minibatches: int,
    schedule: str = "1f1b",
    microbatches: int = 1,
    depths: tuple[int, ...] | None = None,
    recompute: tuple[bool | int, ...] | None = None,
    chunks: int = 1,
) -> list[tuple[TrainingSpec, Job, TrainResult, Weights]]:
    """Train all cases in one set of processes; return the jobs, their results and the final
    weights.

    Every other case runs on ranks in another order. Where stages are replicated, some cases run a
    second time, with the optimizer divided over the replicas.
    """
    jobs = []
    for number, (model, optimizer) in enumerate(cases):
        path = write_model(folder, model, optimizer)
        plan = make_plan(
            _profile_of(folder, model), replicas, schedule, microbatches, depths, chunks
        )
        if recompute is not None:
            plan = recomputing(plan, recompute)
        plan = scattered(plan) if number % 2 else plan
        plans = {"": plan}
        if max(replicas) > 1 and (model, optimizer) in FEW[-1:]:
            plans["-sharded"] = sharded(plan)
        for suffix, each in plans.items():
            weights = str(folder / f"{model}-{optimizer}{suffix}.pt")
            jobs.append(
                Job(model=str(path), plan=each, steps=minibatches, seed=SEED, save_weights=weights)
            )
    results = run_jobs(jobs, folder)
    saved = [torch.load(str(job.save_weights), weights_only=True) for job in jobs]
    return [
        (load_model_file(job.model), job, result, state)
        for job, result, state in zip(jobs, results, saved, strict=True)
    ]


def recomputing(plan: Plan, how: tuple[bool | int, ...]) -> Plan:
    """Return the plan with stages that recompute wholly, or of so many equal parts the first, the
    third, and so on.
    """

    def groups(layers: tuple[str, ...], parts: int) -> tuple[tuple[str, ...], ...]:
        bounds = [round(part * len(layers) / parts) for part in range(parts + 1)]
        return tuple(layers[a:b] for a, b in list(pairwise(bounds))[::2] if a < b)

    choices = [
        h if isinstance(h, bool) else groups(s.layers, h)
        for s, h in zip(plan.stages, how, strict=True)
    ]
    changes = [{"recompute": choice, "recompute_s": 0.0} for choice in choices]
    stages = (
        stage.model_copy(update=change) for stage, change in zip(plan.stages, changes, strict=True)
    )
    return plan.model_copy(update={"stages": tuple(stages)})


def stage_parameters(
    folder: Path, spec: TrainingSpec, whole: StageModule, job: Job
) -> list[list[str]]:
    """Return the names of each stage's parameters."""
    stage_of = {
        layer: index for index, stage in enumerate(job.plan.stages) for layer in stage.layers
    }
    profile = _profile_of(folder, Path(spec.origin).stem.partition("_")[0])
    owner = {name: layer.name for layer in profile.layers for name in layer.parameters}
    return [
        [name for name, _ in whole.named_parameters() if stage_of[owner[name]] == stage]
        for stage in range(len(job.plan.stages))
    ]


@cache
def _profile_of(folder: Path, model: str) -> Profile:
    """Profile a model; its graph does not depend on the optimizer."""
    return structural_profile(write_model(folder, model, "sgd"), BATCH_SIZE)


@pytest.mark.parametrize(
    ("cases", "replicas", "minibatches", "depths"),
    [
        pytest.param(CASES, (1, 1), 9, None, id="1-1", marks=pytest.mark.slow),
        pytest.param(CASES, (1, 1, 1), 9, None, id="1-1-1", marks=pytest.mark.slow),
        pytest.param(CASES, (2, 1), 9, None, id="2-1", marks=pytest.mark.slow),
        pytest.param(FEW, (2, 1, 1), 10, None, id="2-1-1 few"),
        pytest.param(CASES, (2, 1, 1), 10, None, id="2-1-1", marks=pytest.mark.slow),
        pytest.param(CASES, (1, 2), 7, (5, 1), id="1-2-deeper", marks=pytest.mark.slow),
    ],
)
def test_asynchronous_1f1b_equals_delayed_updates_to_the_bit(
    cases: list[Case],
    replicas: tuple[int, ...],
    minibatches: int,
    depths: tuple[int, ...] | None,
    tmp_path: Path,
) -> None:
    """Covers all optimizers, BatchNorm, dropout, skips, integers, and partial last rounds (9 = 4 *
    2 + 1).
    """
    runs = run_cases(tmp_path, cases, replicas, minibatches, depths=depths)
    for spec, job, result, weights in runs:
        whole = unsplit(spec)
        data = make_batches(spec, BATCH_SIZE, 1, SEED)

        def forward_loss(model: nn.Module, minibatch: int, data: BatchSource = data) -> Tensor:
            assert isinstance(model, StageModule)
            model.set_random_key(SEED, minibatch, 0)
            loss: Tensor = model(data.batch(Unit(minibatch)), {})["loss"]
            return loss

        names = stage_parameters(tmp_path, spec, whole, job)
        losses, expected = delayed_updates(
            whole,
            names,
            replicas,
            spec.optimizer,
            forward_loss,
            minibatches,
            depths,
        )
        assert [entry.loss for entry in result.losses] == losses, job.model
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), (job.model, name)
        assert max(report.weight_versions for report in result.reports) > 1


@pytest.mark.parametrize(
    ("cases", "replicas", "microbatches", "minibatches"),
    [
        pytest.param(FEW, (2, 1), 3, 5, id="2-1 few"),
        pytest.param(CASES, (1, 1), 4, 6, id="1-1", marks=pytest.mark.slow),
        pytest.param(CASES, (1, 1, 1), 3, 6, id="1-1-1", marks=pytest.mark.slow),
        pytest.param(CASES, (2, 1), 3, 5, id="2-1", marks=pytest.mark.slow),
        pytest.param(CASES, (1, 2), 5, 5, id="1-2", marks=pytest.mark.slow),
    ],
)
def test_2bw_equals_updates_delayed_by_one_to_the_bit(
    cases: list[Case],
    replicas: tuple[int, ...],
    microbatches: int,
    minibatches: int,
    tmp_path: Path,
) -> None:
    """Every stage uses the version from one minibatch before, and holds two versions."""
    for spec, job, result, weights in run_cases(
        tmp_path, cases, replicas, minibatches, "2bw", microbatches
    ):
        whole = unsplit(spec)
        data = make_batches(spec, BATCH_SIZE, microbatches, SEED)

        def forward_loss(
            model: nn.Module, minibatch: int, microbatch: int, data: BatchSource = data
        ) -> Tensor:
            assert isinstance(model, StageModule)
            model.set_random_key(SEED, minibatch, microbatch)
            loss: Tensor = model(data.batch(Unit(minibatch, microbatch)), {})["loss"]
            return loss

        losses, expected = double_buffered(
            whole,
            stage_parameters(tmp_path, spec, whole, job),
            replicas,
            spec.optimizer,
            forward_loss,
            minibatches,
            microbatches,
        )
        assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-6), job.model
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), (job.model, name)
        assert max(report.weight_versions for report in result.reports) == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("cases", "schedule", "microbatches", "replicas", "chunks"),
    [
        pytest.param(
            FEW,
            "1f1b-flush",
            1,
            (1, 1),
            1,
            id="1f1b-flush 1-1, one microbatch",
            marks=pytest.mark.slow,
        ),
        pytest.param(CASES, "gpipe", 4, (1, 1), 1, id="gpipe 1-1", marks=pytest.mark.slow),
        pytest.param(FEW, "gpipe", 3, (2, 1), 1, id="gpipe 2-1 few"),
        pytest.param(CASES, "gpipe", 3, (2, 1), 1, id="gpipe 2-1", marks=pytest.mark.slow),
        pytest.param(FEW, "1f1b-flush", 4, (1, 1), 1, id="1f1b-flush 1-1 few"),
        pytest.param(
            CASES, "1f1b-flush", 4, (1, 1), 1, id="1f1b-flush 1-1", marks=pytest.mark.slow
        ),
        pytest.param(
            CASES, "1f1b-flush", 5, (1, 2), 1, id="1f1b-flush 1-2", marks=pytest.mark.slow
        ),
        pytest.param(FEW, "zb-h1", 4, (1, 1, 1), 1, id="zb-h1 1-1-1 few"),
        pytest.param(CASES, "zb-h1", 5, (1, 2), 1, id="zb-h1 1-2", marks=pytest.mark.slow),
        pytest.param(FEW, "zb-v", 4, (1,) * 4, 2, id="zb-v 2 workers few"),
        pytest.param(
            CASES, "zb-v", 5, (2,) * 4, 2, id="zb-v 2 workers twice", marks=pytest.mark.slow
        ),
        pytest.param(FEW, "v-half", 5, (1,) * 4, 2, id="v-half 2 workers few"),
        pytest.param(
            CASES, "v-half", 5, (2,) * 4, 2, id="v-half 2 workers twice", marks=pytest.mark.slow
        ),
        pytest.param(FEW, "v-min", 7, (1,) * 6, 2, id="v-min 3 workers few"),
        pytest.param(CASES, "v-min", 4, (1,) * 4, 2, id="v-min 2 workers", marks=pytest.mark.slow),
        pytest.param(FEW, "interleaved", 4, (1,) * 4, 2, id="interleaved 2 workers few"),
        pytest.param(
            CASES, "interleaved", 4, (1,) * 4, 2, id="interleaved 2 workers", marks=pytest.mark.slow
        ),
        pytest.param(
            CASES,
            "interleaved",
            5,
            (2,) * 4,
            2,
            id="interleaved 2 workers twice",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_synchronous_schedules_equal_plain_training(
    cases: list[Case],
    schedule: str,
    microbatches: int,
    replicas: tuple[int, ...],
    chunks: int,
    tmp_path: Path,
) -> None:
    """Equal to rounding; BatchNorm normalises each microbatch by itself, in the reference too."""
    minibatches = 6
    runs = run_cases(tmp_path, cases, replicas, minibatches, schedule, microbatches, chunks=chunks)
    for spec, job, result, weights in runs:
        whole = unsplit(spec)
        data = make_batches(spec, BATCH_SIZE, microbatches, SEED)

        def microbatch_losses(
            model: nn.Module, minibatch: int, data: BatchSource = data
        ) -> list[Tensor]:
            assert isinstance(model, StageModule)
            losses = []
            for microbatch in range(microbatches):
                model.set_random_key(SEED, minibatch, microbatch)
                losses.append(model(data.batch(Unit(minibatch, microbatch)), {})["loss"])
            return losses

        losses, expected = plain_training(whole, spec.optimizer, microbatch_losses, minibatches)
        assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-4), job.model
        for name, tensor in expected.items():
            torch.testing.assert_close(
                weights[name], tensor, rtol=1e-3, atol=1e-5, msg=f"{job.model} {name}"
            )


@pytest.mark.parametrize(
    ("schedule", "microbatches", "replicas", "recompute"),
    [
        pytest.param("1f1b", 1, (1, 1), (3, True), id="1f1b 1-1"),
        pytest.param("1f1b", 1, (2, 1), (True, 2), id="1f1b 2-1", marks=pytest.mark.slow),
        pytest.param("gpipe", 3, (1, 1), (False, True), id="gpipe 1-1", marks=pytest.mark.slow),
        pytest.param("2bw", 3, (2, 1), (2, 3), id="2bw 2-1", marks=pytest.mark.slow),
        pytest.param("1f1b-flush", 3, (1, 2), (3, 3), id="1f1b-flush 1-2", marks=pytest.mark.slow),
        pytest.param("zb-h1", 4, (1, 1, 1), (2, 3, 2), id="zb-h1 1-1-1", marks=pytest.mark.slow),
        pytest.param("zb-v", 4, (1,) * 4, (1, 2, False, True), id="zb-v", marks=pytest.mark.slow),
        pytest.param(
            "interleaved",
            4,
            (1,) * 4,
            (1, 2, False, True),
            id="interleaved",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_recomputing_changes_nothing_to_the_bit(
    schedule: str,
    microbatches: int,
    replicas: tuple[int, ...],
    recompute: tuple[bool | int, ...],
    tmp_path: Path,
) -> None:
    """Dropout draws the same, BatchNorm counts one forward, and gradients are of the same
    weights.
    """
    cases = [(model, "momentum") for model in ("convolutional", "blocks")]
    chunks = 2 if find(schedule).chunked else 1
    plain = run_cases(tmp_path, cases, replicas, 7, schedule, microbatches, chunks=chunks)
    again = run_cases(
        tmp_path, cases, replicas, 7, schedule, microbatches, recompute=recompute, chunks=chunks
    )
    for (_, job, one, weights), (_, _, other, other_weights) in zip(plain, again, strict=True):
        assert one.losses == other.losses, job.model
        assert weights.keys() == other_weights.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, other_weights[name]), (job.model, name)


def test_deferred_weights_change_nothing_to_the_bit(tmp_path: Path) -> None:
    """Each worker makes only its own stage's weights."""
    plan = make_plan(_profile_of(tmp_path, "language"), (1, 1), "1f1b-flush", 2)
    path = str(write_model(tmp_path, "language", "momentum"))
    jobs = [
        Job(
            model=path,
            plan=plan,
            steps=5,
            seed=SEED,
            defer_weights=defer,
            save_weights=str(tmp_path / f"{defer}.pt"),
        )
        for defer in (False, True)
    ]
    results = run_jobs(jobs, tmp_path)
    assert [[report.deferred_weights for report in result.reports] for result in results] == [
        [False] * 2,
        [True] * 2,
    ]
    assert results[0].losses == results[1].losses
    whole, deferred = (torch.load(str(job.save_weights), weights_only=True) for job in jobs)
    for name, tensor in whole.items():
        assert torch.equal(tensor, deferred[name]), name


def test_a_plan_that_sends_what_every_stage_makes_itself_trains_as_before(tmp_path: Path) -> None:
    """Plans of before sent values of constants, too: here the positions modulo 2."""
    path = write_model(tmp_path, "language", "momentum", samples=16)
    spec = load_model_file(path)
    made = {node.name for node in capture_file(spec, spec.example_batch(BATCH_SIZE)).fixed}
    profile = planner.estimate(path, device="cpu", batch_size=BATCH_SIZE)
    plan = planner.price(
        profile, planner.flat_cluster(2, "1Gbps"), 2, schedule="1f1b-flush", microbatches=2
    )
    (transfer,) = plan.transfers
    [constant] = [name for name in made if name.startswith("remainder")]
    assert made.isdisjoint(transfer.values)
    more = transfer.model_copy(update={"values": (*transfer.values, constant)})
    plans = plan, plan.model_copy(update={"transfers": (more,)})
    losses = [[each.loss for each in planner.train(path, each, steps=3).losses] for each in plans]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
