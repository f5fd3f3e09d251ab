"""A forward that changes which parameters there are, or which are trained, is refused; each way out
trains.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import CaptureError
from planner.model.capture.capture import capture_file
from planner.model.options import PLAIN
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.capture_check import check_captured
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split

FILE = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x):
        CHANGE
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))) * EXTRA)

def build_model():
    model = Net()
    BUILT
    return model

def example_batch(n): return (torch.randn(n, 6),), torch.randint(0, 4, (n,))
def loss(output, target): return F.cross_entropy(output, target)
"""
BLOCKS = """
class Tanh(nn.Module):
    def forward(self, x): return torch.tanh(x)

class Frozen(nn.Linear):
    def forward(self, x):
        CHANGE
        return super().forward(x)

def build_model():
    model = nn.Sequential(nn.Linear(6, 8), Tanh(), Frozen(8, 8), nn.Linear(8, 4))
    BUILT
    return model

def blocks(model): return list(model)
"""
MADE = "if not hasattr(self, 'extra'): self.extra = nn.Parameter(torch.ones(8))"
CALLED = "model(torch.zeros(2, 6))"
SET, MAKE = (
    "set requires_grad in build_model()",
    "make it in build_model(), or call the model once there",
)

# What forward does, what it multiplies with, what is said, and ways out within build_model().
CHANGES = {
    "frozen": (
        "self.b.weight.requires_grad_(False)",
        "1",
        "sets requires_grad of parameter 'b.weight' to False",
        SET,
        ["model.b.weight.requires_grad_(False)", CALLED],
    ),
    "a module frozen": (
        "self.a.requires_grad_(False)",
        "1",
        "sets requires_grad of parameter 'a.weight' to False",
        SET,
        ["model.a.requires_grad_(False)"],
    ),
    "assigned": (
        "self.b.bias.requires_grad = False",
        "1",
        "sets requires_grad of parameter 'b.bias' to False",
        SET,
        ["model.b.bias.requires_grad = False"],
    ),
    "made": (
        MADE,
        "self.extra",
        "makes parameter 'extra'",
        MAKE,
        [CALLED, "model.extra = nn.Parameter(torch.ones(8))"],
    ),
    "a module made": (
        "if not hasattr(self, 'scale'): self.scale = nn.Linear(1, 8)",
        "self.scale(x.mean(1, keepdim=True))",
        "makes parameter 'scale.weight'",
        MAKE,
        [CALLED, "model.scale = nn.Linear(1, 8)"],
    ),
    "removed": (
        "self.b.bias = None",
        "1",
        "removes parameter 'b.bias'",
        "build the model without it",
        [CALLED, "model.b.bias = None"],
    ),
    "replaced": (
        "self.b.weight = nn.Parameter(0.5 * self.b.weight.detach())",
        "1",
        "puts another parameter in the place of 'b.weight'",
        "compute with a tensor made from the parameter",
        [],
    ),
}


def _load(
    folder: Path, change: str, extra: str = "1", built: str = "pass", text: str = FILE
) -> TrainingSpec:
    path = folder / "model.py"
    text = text.replace("CHANGE", change).replace("EXTRA", extra).replace("BUILT", built)
    path.write_text(text, encoding="utf-8")
    return load_model_file(path)


@pytest.mark.parametrize("kind", CHANGES)
def test_parameters_changed_by_forward_are_refused(tmp_path: Path, kind: str) -> None:
    change, extra, message, hint, _ = CHANGES[kind]
    spec = _load(tmp_path, change, extra)
    model = spec.build_model()
    before = [(name, id(each), each.requires_grad) for name, each in model.named_parameters()]

    with pytest.raises(CaptureError, match=message) as raised:
        capture_file(spec, spec.example_batch(4), model)

    assert hint in (raised.value.hint or "")
    assert [
        (name, id(each), each.requires_grad) for name, each in model.named_parameters()
    ] == before


WAYS_OUT = [(kind, built) for kind, change in CHANGES.items() for built in change[-1]]


@pytest.mark.parametrize(("kind", "built"), WAYS_OUT)
def test_what_the_hint_names_trains(tmp_path: Path, kind: str, built: str) -> None:
    change, extra, *_ = CHANGES[kind]
    spec = _load(tmp_path, change, extra, built)
    batch = spec.example_batch(4)
    graph = capture_file(spec, batch)
    assert_same(
        run_split(graph, batch, cut_evenly(graph, 2), None), run_model(graph, batch, spec.loss)
    )
    check_captured(spec, graph, [batch], PLAIN)


def test_a_tensor_made_from_a_parameter_trains(tmp_path: Path) -> None:
    spec = _load(tmp_path, "pass", "F.linear(x.new_ones(8), 0.5 * self.b.weight)")
    batch = spec.example_batch(4)
    check_captured(spec, capture_file(spec, batch), [batch], PLAIN)


def test_flags_that_a_forward_sets_to_what_they_are_do_not_matter(tmp_path: Path) -> None:
    spec = _load(tmp_path, "self.a.requires_grad_(True)")
    assert len(capture_file(spec, spec.example_batch(4)).layers) > 2


def test_a_forward_that_thaws_a_parameter_is_refused(tmp_path: Path) -> None:
    spec = _load(tmp_path, "self.a.requires_grad_(True)", built="model.a.requires_grad_(False)")
    with pytest.raises(CaptureError, match=r"requires_grad of parameter 'a.weight' to True"):
        capture_file(spec, spec.example_batch(4))


def test_a_call_that_freezes_while_the_model_is_measured_is_refused(tmp_path: Path) -> None:
    spec = _load(tmp_path, "self.calls += 1; self.b.requires_grad_(self.calls < 3)")
    with pytest.raises(CaptureError, match=r"sets requires_grad of parameter 'b.weight' to False"):
        profile_model(spec, 4, ProfilingOptions(device="cpu", seconds=0, repeats=3))


def test_the_comparison_of_gradients_refuses_a_call_that_freezes(tmp_path: Path) -> None:
    spec = _load(tmp_path, "self.b.requires_grad_(self.calls < 1)")
    batch = spec.example_batch(4)
    graph = capture_file(spec, batch)
    vars(graph.model)["calls"] = 1
    with pytest.raises(CaptureError, match=r"sets requires_grad of parameter 'b.weight' to False"):
        check_captured(spec, graph, [batch], PLAIN)
    assert graph.model.get_parameter("b.weight").requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "self.weight.requires_grad_(False)",
            "sets requires_grad of parameter '2.weight' to False",
        ),
        (
            "if not hasattr(self, 'extra'): self.extra = nn.Parameter(torch.ones(8))",
            "makes parameter '2.extra'",
        ),
    ],
)
def test_blocks_that_change_parameters_are_refused(
    tmp_path: Path, change: str, message: str
) -> None:
    text = FILE[: FILE.index("class Net")] + BLOCKS + FILE[FILE.index("def example_batch") :]
    spec = _load(tmp_path, change, text=text)
    for model in (spec.build_model(), spec.build_model().to("meta")):
        with pytest.raises(CaptureError, match=message):
            capture_file(spec, spec.example_batch(4), model)

    called = _load(tmp_path, change, built="model(torch.zeros(2, 6))", text=text)
    assert len(capture_file(called, called.example_batch(4)).layers) == 5


def test_a_lazy_module_is_refused_unless_the_model_was_called(tmp_path: Path) -> None:
    text = FILE.replace("nn.Linear(8, 8)", "nn.LazyLinear(8)")
    spec = _load(tmp_path, "pass", text=text)
    with pytest.raises(
        CaptureError, match=r"'b.weight' has no shape yet, its module is lazy"
    ) as raised:
        capture_file(spec, spec.example_batch(4))
    assert "call the model once" in (raised.value.hint or "")

    called = _load(tmp_path, "pass", built=CALLED, text=text)
    assert len(capture_file(called, called.example_batch(4)).layers) > 2
