"""Mixed precision: stages under autocast compute what the model computes under autocast.

Channels-last: stages compute what the unsplit channels-last model computes, and messages keep the
order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.api.running import train
from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.model.batch import Batch
from planner.model.capture.capture import capture, capture_file
from planner.model.deferred_weights import DeferredModel
from planner.model.options import ModuleOptions, autocast_dtype, autocast_name, channels_last
from planner.model.spec import load_model_file
from planner.model.stage.stage import build_stage
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.solver import search_plan as solve
from tests.executor.models import MODELS, write_model
from tests.model.architectures import ARCHITECTURES
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split
from tests.profiler.measured.stages_alone import verify

pytestmark = pytest.mark.usefixtures("warm_start")

CHANNELS_LAST = ModuleOptions(channels_last=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("stages", [3, 7])
@pytest.mark.parametrize("name", ["vgg", "resnet", "unet"])
def test_stages_of_images_pixel_by_pixel(
    name: str, stages: int, autocast: torch.dtype | None
) -> None:
    case = ARCHITECTURES[name]
    torch.manual_seed(1)
    graph = capture(
        case.build(), case.batch(4), case.loss, options=ModuleOptions(autocast, channels_last=True)
    )
    images = [spec for spec in graph.values.values() if len(spec.sizes) == 4]
    assert any(spec.order == (0, 2, 3, 1) for spec in images)
    assert (
        graph.hash
        != capture(case.build(), case.batch(4), case.loss, options=ModuleOptions(autocast)).hash
    )
    torch.manual_seed(2)
    batch = case.batch(6)
    torch.manual_seed(4)
    whole = run_model(graph, batch, case.loss)
    torch.manual_seed(4)
    assert_same(whole, run_split(graph, batch, cut_evenly(graph, stages), None))


def test_models_without_images_are_as_they_were() -> None:
    case = ARCHITECTURES["gpt2"]
    torch.manual_seed(1)
    graph = capture(case.build(), case.batch(4), case.loss, options=CHANNELS_LAST)
    batch = case.batch(6)
    torch.manual_seed(4)
    whole = run_model(graph, batch, case.loss)
    torch.manual_seed(4)
    assert_same(whole, run_split(graph, batch, cut_evenly(graph, 3), None))


def test_weights_of_four_and_five_dimensions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.Linear(3, 4))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parameters = list(model.parameters())
    ModuleOptions(channels_last=True).prepare(model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    weights = [parameter for parameter in parameters if parameter.dim() > 3]
    formats = (torch.channels_last, torch.channels_last_3d)
    assert all(w.is_contiguous(memory_format=f) for w, f in zip(weights, formats, strict=True))


def test_videos() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv3d(2, 4, 3), nn.Conv3d(4, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x).relu()).mean((2, 3, 4))
            return result

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    torch.manual_seed(1)
    batch = Batch((torch.randn(4, 2, 7, 7, 7),), target=torch.randint(0, 3, (4,)))
    graph = capture(Net(), batch, loss, options=CHANNELS_LAST)
    assert next(iter(graph.values.values())).order == (0, 2, 3, 4, 1)
    assert_same(run_model(graph, batch, loss), run_split(graph, batch, cut_evenly(graph, 3), None))


def test_the_target_stays_as_it_is() -> None:
    """An autoencoder's target is an image too, but not one that the model sees."""
    image = torch.randn(2, 3, 4, 4)
    batch = Batch((image,), {"other": image}, image).prepared(CHANNELS_LAST)
    assert batch.args[0].is_contiguous(memory_format=torch.channels_last)
    assert batch.kwargs["other"].is_contiguous(memory_format=torch.channels_last)
    assert batch.target is image
    assert channels_last(batch.args[0]) is batch.args[0]


def test_weights_made_for_one_stage_alone(tmp_path: Path) -> None:
    """The graph of the model without weights has the hash of the model with them."""
    file = load_model_file(write_model(tmp_path, "convolutional", "sgd"))
    graph = capture_file(file, file.example_batch(4), options=CHANNELS_LAST)
    deferred = DeferredModel(file.build_model)
    other = capture_file(file, file.example_batch(4), deferred.model, options=CHANNELS_LAST)
    assert other.hash == graph.hash
    layers = [layer.name for layer in other.layers]
    deferred.materialize([name for name, _ in deferred.model.named_parameters()])
    stage = build_stage(other, layers)
    weight = dict(stage.named_parameters())["blocks.0.conv.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert stage(file.example_batch(4), {})["loss"].isfinite()


@pytest.mark.sampled(3)
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
    try:
        whole = run_model(graph, batch, case.loss)
    except RuntimeError as error:
        if "primitive descriptor for the LSTM" not in str(error):
            raise
        pytest.skip("this CPU has no LSTM in bfloat16")
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
    sent = [
        sum(v.output_bytes for layer in one.layers for v in layer.outputs) for one in (half, full)
    ]
    assert sent[0] < sent[1]
    plan = solve(half, flat_cluster(2, 1e9))
    assert plan.autocast == "bfloat16"
    assert all(
        time.measured_s > 0
        for time in verify(file, half, [s.layers for s in plan.stages], seconds=0.1)
    )


def test_training_in_half_precision(tmp_path: Path) -> None:
    path = write_model(tmp_path, "convolutional", "sgd")
    profile = profile_model(
        load_model_file(path), 4, ProfilingOptions(repeats=1, seconds=0.1, dtype="bf16")
    )
    plan = solve(profile, flat_cluster(2, 1e12), schedule="1f1b-flush", microbatches=2)
    result = train(path, plan, steps=3)
    assert len(result.losses) == 3


def test_float16_is_profiled_planned_and_trained(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "sgd")
    profile = profile_model(
        load_model_file(path), 4, ProfilingOptions(repeats=1, seconds=0.1, dtype="fp16")
    )
    assert profile.autocast == "float16"
    plan = solve(profile, flat_cluster(2, 1e12))
    assert len(train(path, plan, steps=3).losses) == 3


def test_names_of_types() -> None:
    assert autocast_dtype("float32") is None
    assert autocast_name(autocast_dtype("fp16")) == "float16"
    with pytest.raises(InputError, match="int8 cannot be measured"):
        autocast_dtype("int8")
