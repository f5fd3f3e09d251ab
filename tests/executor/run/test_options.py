"""Plans with autocast, channels-last or compilation equal references with the same options, without
the executor.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.api.running import train
from planner.executor.run.data import make_batches
from planner.model.batch import Batch
from planner.model.capture.capture import capture_file
from planner.model.loss import loss_of
from planner.model.options import ModuleOptions
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.stage import StageModule, build_stage
from planner.schedule.instructions import Unit
from planner.workers.job import Job, TrainResult
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.reference import delayed_updates

pytestmark = pytest.mark.usefixtures("warm_start")

GATES = """
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh((self.one if x.mean() > 0 else self.other)(x))

def build_model():
    return nn.Sequential(Gate(), Gate(), nn.Linear(8, 3))

def blocks(model):
    return list(model)

def example_batch(batch_size):
    return torch.randn(batch_size, 8), torch.randint(0, 3, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
BATCH_SIZE, SEED, MINIBATCHES = 4, 3, 7


def _job(folder: Path, model: str, options: ModuleOptions) -> Job:
    path = write_model(folder, model, "momentum")
    plan = make_plan(structural_profile(path, BATCH_SIZE, options), (1, 1))
    assert plan.memory_format == ("channels-last" if options.channels_last else None)
    assert plan.compiled == options.compiled
    return Job(model=str(path), plan=plan, steps=MINIBATCHES, seed=SEED)


def _reference(job: Job, options: ModuleOptions) -> list[float]:
    """Return the losses of delayed updates on the unsplit model, not compiled."""
    file = load_model_file(job.model)
    torch.manual_seed(SEED)
    model = file.build_model()
    graph = capture_file(file, file.example_batch(BATCH_SIZE), model, options=options)
    whole = build_stage(graph, [layer.name for layer in graph.layers])
    data = make_batches(file, BATCH_SIZE, 1, SEED)

    def forward_loss(module: nn.Module, minibatch: int) -> Tensor:
        assert isinstance(module, StageModule)
        module.set_random_key(SEED, minibatch, 0)
        return module(data.batch(Unit(minibatch)), {})["loss"]  # type: ignore[no-any-return]

    owner = {name: layer.name for layer in graph.layers for name in layer.parameters}
    names = [
        [name for name, _ in whole.named_parameters() if owner[name] in stage.layers]
        for stage in job.plan.stages
    ]
    return delayed_updates(whole, names, (1, 1), file.optimizer, forward_loss, MINIBATCHES)[0]


def test_channels_last_to_the_bit(tmp_path: Path) -> None:
    options = ModuleOptions(channels_last=True)
    job = _job(tmp_path, "convolutional", options)
    (result,) = run_jobs([job], tmp_path)
    assert [entry.loss for entry in result.losses] == _reference(job, options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_to_rounding(tmp_path: Path) -> None:
    jobs = [
        _job(tmp_path, model, ModuleOptions(compiled=True))
        for model in ("convolutional", "language", "blocks")
    ]
    for job, result in zip(jobs, run_jobs(jobs, tmp_path), strict=True):
        expected = _reference(job, ModuleOptions())
        assert [entry.loss for entry in result.losses] == pytest.approx(expected, rel=1e-4), (
            job.model
        )
        assert max(report.weight_versions for report in result.reports) > 1


@pytest.mark.slow
def test_the_baseline_trains_weights_that_some_steps_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "gates.py"
    path.write_text(GATES, encoding="utf-8")
    plan = make_plan(structural_profile(path, BATCH_SIZE), (1, 1))
    result = train(path, plan, steps=8, seed=SEED, baseline="data-parallel")
    assert len(result.losses) == 8


def _data_parallel(file: TrainingSpec) -> list[float]:
    """Return the losses of one worker's steps, written out."""
    torch.manual_seed(SEED)
    model = file.build_model().train()
    ModuleOptions(channels_last=True).prepare(model)
    optimizer = file.optimizer(list(model.parameters()))
    data = make_batches(file, BATCH_SIZE, 1, SEED)
    losses = []
    for minibatch in range(MINIBATCHES):
        torch.manual_seed(SEED * 1_000_003 + minibatch)
        batch: Batch = data.batch(Unit(minibatch)).prepared(ModuleOptions(channels_last=True))
        loss = loss_of(model(*batch.args), batch.target, file.loss)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_baseline_honours_them(compiled: bool, tmp_path: Path) -> None:
    path = write_model(tmp_path, "convolutional", "momentum")
    # A run draws the masks of dropout for each stage and microbatch, a plain loop otherwise.
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("nn.Dropout(0.3)", "nn.Dropout(0.0)"), encoding="utf-8")
    options = ModuleOptions(channels_last=True, compiled=compiled)
    plan = make_plan(structural_profile(path, BATCH_SIZE, options), (1,))
    result: TrainResult = train(path, plan, steps=MINIBATCHES, seed=SEED, baseline="data-parallel")
    expected = _data_parallel(load_model_file(path))
    assert [entry.loss for entry in result.losses] == pytest.approx(
        expected, rel=1e-4 if compiled else 0.0
    )
