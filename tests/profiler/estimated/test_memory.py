"""Memory of estimates: the peaks of a step beside those of the allocator, and what optimizers move
and allocate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.formats.profile import Layer
from planner.model.spec import TrainingSpec, load_model_file
from planner.profiler.estimated.devices import DEVICES
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.profiler.estimated.execution import Execution
from planner.profiler.estimated.update import trace_updates
from planner.profiler.measured import profiling
from planner.profiler.measured.profiling import ProfilingOptions, profile_model

ATTENDING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(512, 256)
        self.norm = nn.LayerNorm(256)
        self.qkv = nn.Linear(256, 768)
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)
        self.head = nn.Linear(256, 512)

    def forward(self, tokens):
        x = self.words(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax((q @ k.transpose(1, 2)) / 16, dim=-1) @ v
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))

def build_model():
    return Net()

def example_batch(batch_size):
    tokens = torch.zeros(batch_size, 64, dtype=torch.long)
    return tokens, tokens

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
"""
_SMALL = 8192  # bytes: scalars, and what a CPU's kernels take for their threads


def test_a_step_needs_what_the_allocator_counts(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(ATTENDING)
    training_spec = load_model_file(path)
    measured = profile_model(training_spec, 8, ProfilingOptions(seconds=0.01, repeats=1)).layers
    estimated = estimate_profile(training_spec, 8, EstimateOptions(device="cpu")).layers
    assert workspaces(estimated) == pytest.approx(workspaces(measured), abs=_SMALL)
    assert max(workspaces(estimated)) > 8 * 64 * 512 * 4
    assert updates(estimated) == pytest.approx(updates(measured), abs=_SMALL)


@pytest.mark.parametrize("how", ["estimated", "measured", "layer by layer"])
def test_the_gradient_of_a_tied_weight_is_no_workspace_of_the_layers_between(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer makes it and the first one adds to it; a stage that has neither does not hold
    it.
    """
    tied, apart = tmp_path / "tied.py", tmp_path / "apart.py"
    apart.write_text(
        ATTENDING.replace(
            "self.head = nn.Linear(256, 512)", "self.head = nn.Linear(256, 512, bias=False)"
        )
    )
    made = "return Net()", "net = Net()\n    net.head.weight = net.words.weight\n    return net"
    tied.write_text(apart.read_text().replace(*made))
    found = []
    for path in (tied, apart):
        spec = load_model_file(path)
        if how == "estimated":
            layers = estimate_profile(spec, 8, EstimateOptions(device="cpu")).layers
        else:
            if how != "measured":
                monkeypatch.setattr(profiling, "_may_fit", lambda graph, device: False)
            layers = profile_model(spec, 8, ProfilingOptions(seconds=0.01, repeats=1)).layers
        found.append(workspaces(layers)[1:-2])
    assert found[0] == pytest.approx(found[1], abs=_SMALL)


def workspaces(layers: tuple[Layer, ...]) -> list[int]:
    return [layer.workspace_bytes for layer in layers]


def updates(layers: tuple[Layer, ...]) -> list[int]:
    # A measurement leaves out small layers.
    return [layer.update_workspace_bytes for layer in layers if layer.weight_bytes >= 10**6]


@pytest.mark.parametrize(
    ("options", "moved", "kernels", "workspace"),
    [
        # reads weights, gradients and two moments; writes all but the gradients
        ({"fused": True}, 7, 1, 0),
        ({"foreach": True}, 21, 8, 1),  # a list of square roots beside
        ({}, 21, 8, 1),  # as torch chooses on GPUs
    ],
)
def test_a_list_of_weights_is_one_kernel(
    options: dict[str, Any], moved: float, kernels: int, workspace: float
) -> None:
    weights = {"a": nn.Parameter(torch.empty(400, 300)), "b": nn.Parameter(torch.empty(700, 200))}
    held = sum(weight.nbytes for weight in weights.values())
    adam = TrainingSpec(
        "adam", {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)}
    )
    (update,) = trace_updates([weights], adam, Execution("cuda"), {})
    spec = DEVICES["a100"]
    rate = spec.bandwidth_bytes_per_s * spec.achieved_bandwidth["update"]
    assert update.estimate(spec).update_s * rate / held == pytest.approx(moved, rel=1e-4)
    assert len(update.step.launches) == kernels
    assert update.state_bytes == pytest.approx(2 * held, rel=1e-4)
    assert update.workspace_bytes == workspace * held
    assert update.host_launches == kernels * len(weights) / 16
