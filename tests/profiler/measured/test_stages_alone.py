"""Measured stages compared with the sums of their layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.errors import InputError, PlanError
from planner.formats.cluster import flat_cluster
from planner.model.capture.capture import capture_file
from planner.model.loss import loss_of
from planner.model.spec import load_model_file
from planner.model.stage.stage import build_stage
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.solver import search_plan as solve
from tests.executor.models import MODELS, write_model
from tests.profiler.measured.stages_alone import _runs, verify

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.1),
        nn.Linear(WIDTH, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10),
    )

def example_batch(batch_size):
    return (torch.randn(batch_size, 64),), torch.randint(0, 10, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


def _file(folder: Path, width: int) -> Path:
    path = folder / f"net{width}.py"
    path.write_text(MODEL.replace("WIDTH", str(width)), encoding="utf-8")
    return path


def test_every_stage_is_measured(tmp_path: Path) -> None:
    file = load_model_file(_file(tmp_path, 256))
    profile = profile_model(file, 32, ProfilingOptions(repeats=5, seconds=1))
    # each stage is measured by itself
    plan = solve(profile, flat_cluster(3, 1e12), shard_optimizer="never")
    times = verify(file, profile, [stage.layers for stage in plan.stages], seconds=0.5)
    assert len(times) == len(plan.stages)
    for time, stage in zip(times, plan.stages, strict=True):
        assert time.measured_s > 0
        assert time.summed_s == pytest.approx(stage.forward_s + stage.backward_s + stage.update_s)
        assert time.error == pytest.approx(time.summed_s / time.measured_s - 1)


@pytest.mark.parametrize("model", MODELS)
def test_skips_integers_and_blocks(model: str, tmp_path: Path) -> None:
    file = load_model_file(write_model(tmp_path, model, "momentum"))
    profile = profile_model(file, 4, ProfilingOptions(repeats=2, seconds=0.2))
    plan = solve(profile, flat_cluster(2, 1e12), depth="published")
    assert all(
        time.measured_s > 0
        for time in verify(file, profile, [stage.layers for stage in plan.stages], seconds=0.1)
    )


SKIPS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        a = self.layers[0](x)
        b = self.layers[1](a).tanh()
        return self.layers[3](self.layers[2](b) * a) + a

def build_model():
    return Net()

def example_batch(batch_size):
    return (torch.randn(batch_size, 8),), torch.randn(batch_size, 8)

def loss(output, target):
    return nn.functional.mse_loss(output, target)
"""


def test_stages_get_the_gradients_that_they_get_in_training(tmp_path: Path) -> None:
    path = tmp_path / "skips.py"
    path.write_text(SKIPS, encoding="utf-8")
    file = load_model_file(path)
    torch.manual_seed(0)
    batch = file.example_batch(4)
    graph = capture_file(file, batch)
    names = [layer.name for layer in graph.layers]
    _runs([build_stage(graph, [name]) for name in names], file, batch)
    split = {name: parameter.grad for name, parameter in graph.model.named_parameters()}
    graph.model.zero_grad()
    torch.autograd.backward(loss_of(graph.model(*batch.args), batch.target, file.loss))
    for name, parameter in graph.model.named_parameters():
        torch.testing.assert_close(split[name], parameter.grad)


def test_another_model_is_refused(tmp_path: Path) -> None:
    profile = profile_model(
        load_model_file(_file(tmp_path, 16)), 4, ProfilingOptions(repeats=1, seconds=0.1)
    )
    plan = solve(profile, flat_cluster(2, 1e9))
    with pytest.raises(PlanError, match="another model"):
        verify(
            load_model_file(_file(tmp_path, 8)), profile, [stage.layers for stage in plan.stages]
        )
    imported = profile.model_copy(update={"graph_hash": None})
    with pytest.raises(InputError, match="imported"):
        verify(
            load_model_file(_file(tmp_path, 16)), imported, [stage.layers for stage in plan.stages]
        )
