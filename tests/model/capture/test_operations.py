"""Graphs captured for CUDA on a machine without it: devices, dtypes and layouts of every value at
every cut.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CaptureError
from planner.model.batch import Batch
from planner.model.capture.capture import Trace, capture, observed, traced
from planner.model.capture.regions import regions_of
from planner.model.options import ModuleOptions
from planner.model.spec import load_model_file
from planner.model.stage.stage import build_stage
from tests.model.architectures import ARCHITECTURES
from tests.model.device_models import DEVICE_MODELS
from tests.model.fake_cuda import mismatches

PROFILES = Path(__file__).parents[3] / "profiles"
DTYPES = [None, torch.bfloat16, torch.float16]
SMALL_PROFILES = ("alexnet", "gpt2", "unet")
SLOW_PROFILES = sorted(
    path.parent.name
    for path in PROFILES.glob("*/model.py")
    if path.parent.name not in SMALL_PROFILES
)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PROFILES]
CASES = {**ARCHITECTURES, **DEVICE_MODELS}


@cache
def _traced(name: str) -> tuple[Trace, Batch]:
    torch.manual_seed(0)
    case, batch = CASES[name], CASES[name].batch(2)
    return traced(case.build(), batch, case.loss), batch


SLOWER = {"seq2seq", "translator"}  # to trace
FURTHER = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOWER else name for name in DEVICE_MODELS
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*FURTHER, "gnmt", "towers"])
def test_every_cut_of_architectures(name: str) -> None:
    trace, batch = _traced(name)
    for dtype in DTYPES:
        graph = observed(trace, ModuleOptions(dtype, device="cuda"))
        assert len(graph.layers) > 3
        assert mismatches(graph, batch) == [], dtype


@pytest.mark.parametrize("name", [*SMALL_PROFILES, *SLOW])
def test_every_cut_of_the_models_in_profiles(name: str) -> None:
    path = PROFILES / name / "model.py"
    if "transformers" in path.read_text(encoding="utf-8"):
        pytest.importorskip(
            "transformers", reason="needs the extra 'hf': pip install 'transformers>=4.50'"
        )
    builder = ":build_tiny" if "def build_tiny" in path.read_text(encoding="utf-8") else ""
    spec = load_model_file(f"{path}{builder}")
    torch.manual_seed(0)
    batch = spec.example_batch(2)
    trace = traced(spec.build_model(), batch, spec.loss)
    for dtype in DTYPES:
        assert mismatches(observed(trace, ModuleOptions(dtype, device="cuda")), batch) == [], dtype


@pytest.mark.parametrize("name", ["llama", "tags", "gnmt", "speech"])
def test_the_hash_is_the_same_for_all_devices(name: str) -> None:
    trace, _ = _traced(name)
    for dtype in DTYPES:
        graphs = [observed(trace, ModuleOptions(dtype, device=kind)) for kind in ("cpu", "cuda")]
        assert graphs[0].hash == graphs[1].hash


def test_dtypes_are_those_of_the_device_that_trains() -> None:
    trace, _ = _traced("group norm")
    dtypes = {
        kind: {
            spec.dtype
            for spec in observed(trace, ModuleOptions(torch.bfloat16, device=kind)).values.values()
        }
        for kind in ("cpu", "cuda")
    }
    assert dtypes == {"cpu": {torch.bfloat16}, "cuda": {torch.bfloat16, torch.float32}}


def test_what_a_cpu_refuses_is_captured_for_cuda() -> None:
    """A CPU's autocast gives nn.Bilinear two dtypes, which it refuses; CUDA's makes them one."""
    trace, _ = _traced("towers")
    with pytest.raises(CaptureError, match="same dtype"):
        observed(trace, ModuleOptions(torch.bfloat16))
    assert observed(trace, ModuleOptions(torch.bfloat16, device="cuda")).hash


def test_a_loss_that_cuda_refuses_under_autocast_is_refused_at_capture() -> None:
    model, batch = nn.Linear(4, 1), Batch((torch.rand(4, 4),), {}, torch.rand(4, 1))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(output.sigmoid(), target)

    assert capture(model, batch, loss, options=ModuleOptions(torch.bfloat16)).hash
    with pytest.raises(CaptureError, match="unsafe to autocast"):
        capture(model, batch, loss, options=ModuleOptions(torch.bfloat16, device="cuda"))


def test_faults_put_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wrong before: operations kept the device of the capture, and dtypes followed the
    CPU's autocast.
    """
    trace, tokens = _traced("llama")
    graph = observed(trace, ModuleOptions(device="cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(
            "planner.model.stage.graph_stage.moved", lambda _, args, kwargs, *__: (args, kwargs)
        )
        assert mismatches(graph, tokens)
    for name, dtype in (
        ("gnmt", torch.float16),
        ("convnext", torch.bfloat16),
        ("group norm", torch.bfloat16),
    ):
        trace, batch = _traced(name)
        assert mismatches(observed(trace, ModuleOptions(dtype, device="cpu")), batch)


class _Attention(nn.Module):
    """Attention as nn.MultiheadAttention wrote it until PyTorch 2.11; (tokens, batch, 8) -> (tokens
    * batch, 8).
    """

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        tokens, batch, width = x.shape
        packed = (
            self.project(x)
            .unflatten(-1, (3, width))
            .unsqueeze(0)
            .transpose(0, -2)
            .squeeze(-2)
            .contiguous()
        )
        q, k, v = (
            part.view(tokens, batch * 2, 4).transpose(0, 1).view(batch, 2, tokens, 4)
            for part in packed
        )
        found = F.scaled_dot_product_attention(q, k, v)
        return found.permute(2, 0, 1, 3).contiguous().view(tokens * batch, width)


def test_a_copy_that_a_cpu_does_not_need_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's attention lays its result out otherwise than a CPU's, whose view of it needs
    no copy.
    """
    batch = Batch((torch.rand(6, 3, 8),), {}, torch.rand(18, 8))

    def copies_after_attention() -> bool:
        _, _, after = traced(_Attention(), batch, F.mse_loss).module.code.partition(
            "scaled_dot_product_attention"
        )
        return "aten.contiguous" in after

    assert copies_after_attention()
    monkeypatch.setattr("planner.model.capture.capture.layouts_kept", nullcontext)
    assert not copies_after_attention()


class _Exact(nn.Module):
    """A product out of autocast, however the device is called, of constants made there; a later
    layer uses it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            turns = torch.eye(4, device=x.device) @ torch.full((4, 4), 0.5, device="cpu")
        x = F.relu(self.first(x))
        scores: Tensor = self.last(x) + turns
        return scores


@pytest.mark.parametrize("inside", ["no_grad", "flat"])
def test_a_region_without_autocast_is_without_that_of_the_stage(inside: str) -> None:
    batch = Batch((torch.rand(4, 4),), {}, torch.rand(4, 4))
    trace = traced(_Exact() if inside == "no_grad" else _ExactWithGradient(), batch, F.mse_loss)
    for kind in ("cpu", "cuda"):
        graph = observed(trace, ModuleOptions(torch.bfloat16, device=kind))
        dtypes = {str(spec.dtype) for node, spec in graph.specs.items() if regions_of(node)}
        assert dtypes == {"torch.float32"}
        if kind == "cuda":
            assert mismatches(graph, batch) == []


class _ExactWithGradient(nn.Module):
    """The same with weights, so that nothing but the region is nested."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            turns = self.first(torch.eye(4, device=x.device))
        scores: Tensor = self.last(F.relu(self.first(x))) + turns
        return scores


class _Branches(nn.Module):
    """A branch by values: operations of its own graphs, with a region under autocast and a constant
    made in one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def one(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                turned = x @ torch.eye(4, device=x.device)
            return turned.float().sin().cos().tanh()

        def other(x: Tensor) -> Tensor:
            return x.cos().sin().exp().tanh()

        x = torch.cond(x.sum() > 0, one, other, (x,))
        result: Tensor = self.last(self.first(x))
        return result


def test_nested_graphs_follow_their_stage() -> None:
    """They hold no device of their own: the buffer that tells theirs moves with the stage, and is
    not saved.
    """
    batch = Batch((torch.rand(3, 4),), {}, torch.rand(3, 4))
    graph = capture(_Branches(), batch, F.mse_loss)
    stage = build_stage(graph, [layer.name for layer in graph.layers])
    assert any("_place" in name for name, _ in stage.named_buffers())
    assert not any("_place" in name for name in stage.state_dict())
    assert {buffer.device.type for buffer in stage.to("meta").buffers()} == {"meta"}
    assert {buffer.device.type for _, buffer in graph.module.named_buffers()} <= {"cpu"}


def test_a_branch_that_has_most_operations_is_named() -> None:
    batch = Batch((torch.rand(3, 4),), {}, torch.rand(3, 4))
    graph = capture(_Branches(), batch, F.mse_loss)
    (cause,) = (layer.cause for layer in graph.layers if layer.cause is not None)
    assert "they are in one operation, 'cond', a branch or a loop" in cause.reason
