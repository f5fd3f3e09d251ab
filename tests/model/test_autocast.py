"""Mixed precision: stages under autocast compute what the model computes under autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.api import train
from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.model.autocast import autocast_dtype, autocast_name
from planner.model.capture.capture import capture
from planner.model.options import ModuleOptions
from planner.model.spec import load_model_file
from planner.profiler.measured.profile import ProfilingOptions, profile_model
from planner.profiler.measured.verify import verify
from planner.solver import solve
from tests.executor.models import MODELS, write_model
from tests.model.architectures import ARCHITECTURES
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split


@pytest.mark.parametrize("stages", [3, 7])
@pytest.mark.parametrize("name", ["vgg", "resnet", "gpt2", "unet", "gnmt"])
def test_stages_under_autocast(name: str, stages: int) -> None:
    case = ARCHITECTURES[name]
    torch.manual_seed(1)
    graph = capture(case.build(), case.batch(4), case.loss, options=ModuleOptions(torch.bfloat16))
    assert torch.bfloat16 in {spec.dtype for spec in graph.values.values()}
    assert graph.hash != capture(case.build(), case.batch(4), case.loss).hash
    torch.manual_seed(2)
    batch = case.batch(6)
    torch.manual_seed(4)
    whole = run_model(graph, batch, case.loss)
    torch.manual_seed(4)
    assert_same(whole, run_split(graph, batch, cut_evenly(graph, stages), None))


@pytest.mark.parametrize("model", MODELS)
def test_profiled_in_half_precision(model: str, tmp_path: Path) -> None:
    """Fewer bytes cross; the plan trains as it was profiled."""
    file = load_model_file(write_model(tmp_path, model, "sgd"))
    full = profile_model(file, 4, ProfilingOptions(repeats=1, seconds=0.1))
    half = profile_model(file, 4, ProfilingOptions(repeats=1, seconds=0.1, dtype="bfloat16"))
    assert half.autocast == "bfloat16"
    assert half.dtype == full.dtype == "float32"  # of the weights
    sent = [sum(v.output_bytes for layer in one.layers for v in layer.outputs) for one in (half, full)]
    assert sent[0] < sent[1]
    plan = solve(half, flat_cluster(2, 1e9))
    assert plan.autocast == "bfloat16"
    assert all(time.measured_s > 0 for time in verify(file, half, [s.layers for s in plan.stages], seconds=0.1))


def test_training_in_half_precision(tmp_path: Path) -> None:
    path = write_model(tmp_path, "convolutional", "sgd")
    profile = profile_model(load_model_file(path), 4, ProfilingOptions(repeats=1, seconds=0.1, dtype="bf16"))
    plan = solve(profile, flat_cluster(2, 1e12), schedule="1f1b-flush", microbatches=2)
    result = train(path, plan, steps=3)
    assert len(result.losses) == 3


def test_float16_is_profiled_planned_and_trained(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "sgd")
    profile = profile_model(load_model_file(path), 4, ProfilingOptions(repeats=1, seconds=0.1, dtype="fp16"))
    assert profile.autocast == "float16"
    plan = solve(profile, flat_cluster(2, 1e12))
    assert len(train(path, plan, steps=3).losses) == 3


def test_names_of_types() -> None:
    assert autocast_dtype("float32") is None
    assert autocast_name(autocast_dtype("fp16")) == "float16"
    with pytest.raises(InputError, match="int8 cannot be measured"):
        autocast_dtype("int8")
