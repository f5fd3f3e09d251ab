"""What no tracer captures, and each way out: taken, it trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.errors import CaptureError
from planner.model.capture.capture import capture_file
from planner.model.spec import load_model_file
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split

HEAD = (
    "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\nfrom "
    "torch.nn.utils import rnn\n"
)
CTC = """
class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(6, 16),
            nn.GRU(16, 16, batch_first=True),
            nn.Linear(16, 5),
        )
    def forward(self, x): return {"scores": self.c(self.b(self.a(x).relu())[0]), "scale": 1}
def build_model(): return Speech()
def example_batch(n):
    target = {
        "labels": torch.randint(1, 5, (n, 4)),
        "lengths": torch.full((n,), 12),
        "own": torch.randint(1, 5, (n,)),
    }
    return (torch.randn(n, 12, 6),), target
def loss(output, target):
    scores = output["scores"].log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, target["labels"], target["lengths"], target["own"])
"""
PACKED = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.out = (
            nn.Embedding(20, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, 4),
        )
    def forward(self, words, lengths):
        packed = rnn.pack_padded_sequence(
            self.embedding(words), lengths, batch_first=True, enforce_sorted=False
        )
        return self.out(self.lstm(packed)[1][0][-1])
def build_model(): return Words()
def example_batch(n):
    return (torch.randint(0, 20, (n, 7)), torch.randint(1, 8, (n,))), torch.randint(0, 4, (n,))
def loss(output, target): return F.cross_entropy(output, target)
"""
PARTS = """
class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 4)
    def forward(self, x): return self.out(x) if x.sum() < 1e9 else x
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = Last()
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers: x = layer(x)
        return self.last(x)
def build_model(): return Deep()
def example_batch(n): return (torch.randn(n, 6),), torch.randint(0, 4, (n,))
def loss(output, target): return F.cross_entropy(output, target)
"""
SIGNS = """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.sign()
    @staticmethod
    def backward(ctx, gradient): return gradient
sign = Sign.apply  # as libraries write it: bound before planner is asked to capture anything
class Signs(nn.Module):
    def forward(self, x): return sign(x)
def build_model(): return nn.Sequential(nn.Linear(6, 8), Signs(), nn.Linear(8, 4))
def example_batch(n): return (torch.randn(n, 6),), torch.randint(0, 4, (n,))
def loss(output, target): return F.cross_entropy(output, target)
"""
SPIKES = SIGNS.replace("x.sign()", "(x > 0).float()").replace(
    "def forward(self, x): return sign(x)",
    """def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(0), persistent=False)
    def forward(self, x):
        self.memory = torch.zeros_like(x) + x  # a buffer of another shape from the first call on
        return sign(self.memory)""",
)
PINN = """
class Physics(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    def forward(self, x):
        x = x.detach().requires_grad_()
        u = self.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u, slope
def build_model(): return Physics()
def example_batch(n): return (torch.rand(n, 2),), torch.rand(n, 1)
def loss(output, target): return F.mse_loss(output[0], target) + output[1].square().mean()
"""


def _written(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(HEAD + text, encoding="utf-8")
    return path


def _trains_split(path: Path, stages: int) -> list[str]:
    """Check that stages compute the step of the whole model, and that it is profiled; return the
    layers.
    """
    spec = load_model_file(path)
    batch = spec.example_batch(4)
    graph = capture_file(spec, batch)
    assert_same(
        run_split(graph, batch, cut_evenly(graph, stages), None), run_model(graph, batch, spec.loss)
    )
    profile = profile_model(spec, 4, ProfilingOptions(device="cpu", seconds=0, repeats=1))
    assert profile.graph_hash == graph.hash
    assert profile.layers[-1].forward_s > 0
    return [layer.name for layer in graph.layers]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        (PACKED, "[model]"),
        (PARTS, "[model.first, *model.layers, model.last]"),
        (PINN, "[model]"),
        (SIGNS, "[model[0], model[1], model[2]]"),
        (CTC, "[model]"),
    ],
    ids=[
        "packed sequence",
        "if on a tensor",
        "double backward",
        "bound autograd function",
        "loss that looks at lengths",
    ],
)
def test_models_that_no_tracer_captures_train_in_blocks(
    tmp_path: Path, text: str, blocks: str
) -> None:
    path = _written(tmp_path, text)
    with pytest.raises(CaptureError) as refused:
        capture_file(load_model_file(path), load_model_file(path).example_batch(4))
    assert re.search(r"blocks\(model\).*: see docs/guides/own-model.md", str(refused.value.hint))
    path.write_text(
        path.read_text(encoding="utf-8") + f"def blocks(model): return {blocks}\n", encoding="utf-8"
    )
    _trains_split(path, 2)


def test_a_buffer_that_takes_another_shape_in_forward_is_put_back(tmp_path: Path) -> None:
    spec = load_model_file(_written(tmp_path, SPIKES))
    model = spec.build_model()
    with pytest.raises(CaptureError, match="'Sign', whose backward cannot be captured"):
        capture_file(spec, spec.example_batch(4), model)
    assert [tuple(buffer.shape) for buffer in model.buffers()] == [(0,)]


def test_modules_that_pytorch_does_not_see_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = PARTS.replace(
        "nn.ModuleList(nn.Linear(8, 8) for _ in range(3))", "[nn.Linear(8, 8) for _ in range(3)]"
    )
    path = _written(tmp_path, hidden.replace(" if x.sum() < 1e9 else x", ""))
    profile_model(load_model_file(path), 4, ProfilingOptions(device="cpu", seconds=0, repeats=1))
    (warning,) = _own_messages(caplog)
    assert "modules in the list 'layers' of Deep will never be trained" in warning
    assert "nn.ModuleList" in warning
    caplog.clear()
    seen = PARTS.replace(" if x.sum() < 1e9 else x", "")
    profile_model(
        load_model_file(_written(tmp_path, seen)),
        4,
        ProfilingOptions(device="cpu", seconds=0, repeats=1),
    )
    assert not _own_messages(caplog)


def _own_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("planner.")]
