"""Models that a planner could trip over: handled, or one clear sentence with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import PlannerError
from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.spec import load_model_file
from planner.model.stage.stage import build_stage
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
ROWS = """
def example_batch(n): return (torch.randn(n, 6),), torch.randint(0, 4, (n,))
def loss(output, target): return F.cross_entropy(output, target)
"""
MODULE = (
    "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        "
    "self.a = nn.Linear(6, 4)\n"
)


def _rows(size: int = 4) -> Batch:
    return Batch((torch.randn(size, 6),), {}, torch.randint(0, 4, (size,)))


REFUSED = {
    "a distribution that checks its arguments": (
        MODULE + "    def forward(self, x):\n"
        "        return torch.distributions.Categorical(logits=self.a(x), "
        "validate_args=True).logits\n"
        "def build_model(): return M()" + ROWS,
        "depends on the values of a tensor",
        "no distributions with validate_args=True",
    ),
    "a loss of its own that looks at the labels": (
        MODULE + "    def forward(self, x, labels):\n"
        "        if labels.max() > 3: raise ValueError\n"
        "        return {'loss': F.cross_entropy(self.a(x), labels)}\n"
        "def build_model(): return M()\n"
        "def example_batch(n): return (torch.randn(n, 6), torch.randint(0, 4, (n,))), None\n",
        "depends on the values of a tensor",
        "give it no labels, and define loss(output, target)",
    ),
    "no parameters": (
        "def build_model(): return nn.Tanh()" + ROWS,
        "Tanh has no parameters that require",
        "nothing to train",
    ),
    "frozen": (
        "def build_model(): return nn.Linear(6, 4).requires_grad_(False)" + ROWS,
        "no parameters that require a gradient",
        "frozen",
    ),
    "output without gradient": (
        "def build_model(): return nn.Linear(6, 4)\n"
        "def example_batch(n): return (torch.randn(n, 6),), torch.randint(0, 4, (n,))\n"
        "def loss(output, target): return (output.argmax(1) - target).float().mean()",
        "the loss does not depend on the model's parameters",
        "made from the output",
    ),
    "a backward that fails": (
        MODULE
        + "    def forward(self, x):\n        x = self.a(x).tanh()\n        return x.mul_(2)\n"
        "def build_model(): return M()" + ROWS,
        "a training step of the model fails: RuntimeError: one of the variables",
        "without planner",
    ),
    "lazy": (
        "def build_model(): return nn.LazyLinear(4)" + ROWS,
        "'weight' has no shape yet",
        "call the model once",
    ),
    "script": (
        "import warnings\nwarnings.simplefilter('ignore')\n"
        "def build_model(): return torch.jit.script(nn.Linear(6, 4))" + ROWS,
        "compiled script",
        "without torch.jit.script",
    ),
    "an object as input": (
        "class Options:\n    k = 3\n"
        + MODULE
        + "    def forward(self, x, options): return self.a(x) * options.k\n"
        "def build_model(): return M()\n"
        "def example_batch(n): return (torch.randn(n, 6), Options()), torch.randint(0, 4, (n,))\n"
        "def loss(output, target): return F.cross_entropy(output, target)",
        "M cannot be captured as a graph",
        "the model must run on example_batch(n)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_clear_sentence(name: str, tmp_path: Path) -> None:
    source, words, hint = REFUSED[name]
    path = tmp_path / "net.py"
    path.write_text(HEAD + source, encoding="utf-8")
    with pytest.raises(PlannerError) as caught:
        profile_model(load_model_file(path), 4, ProfilingOptions(repeats=1, seconds=0.1))
    assert words in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


class InPlace(nn.Module):
    """Writes into one memory from its first layer to its last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(5):
            x.add_(number).mul_(0.5)
        F.relu(x, inplace=True)
        scores: Tensor = self.last(x)
        return scores


class Unused(nn.Module):
    """Parameters that no operation reads, in a module and alone, and an output that no gradient
    reaches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used, self.dead = nn.Linear(6, 4), nn.Linear(50, 50)
        self.alone = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.used(x)
        return {"scores": scores, "best": scores.argmax(1)}


class Größe(nn.Module):
    """Names that are no ASCII, and one that is no identifier."""

    def __init__(self) -> None:
        super().__init__()
        self.größe, self.層 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.add_module("naïve 層-1", nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.get_submodule("naïve 層-1")(self.層(self.größe(x)))
        return scores


def test_in_place_operations_at_every_cut_make_one_layer() -> None:
    graph = capture(InPlace(), _rows(), F.cross_entropy)
    assert [layer.name for layer in graph.layers] == ["first", "last", "loss"]
    batch = _rows(6)
    whole = run_model(graph, batch, F.cross_entropy)
    assert_same(whole, run_split(graph, batch, cut_evenly(graph, 3), None))


def test_unused_parameters_get_no_gradient_and_no_time() -> None:
    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["scores"], target)

    graph = capture(Unused(), _rows(), loss)
    step = run_split(graph, _rows(), cut_evenly(graph, 2), None)
    assert step.gradients["dead.weight"] is None
    assert step.gradients["alone"] is None
    assert set(graph.layers[0].parameters) == {
        "used.weight",
        "used.bias",
        "dead.weight",
        "dead.bias",
        "alone",
    }


def test_names_in_any_script() -> None:
    graph = capture(Größe(), _rows(), F.cross_entropy)
    assert [layer.name for layer in graph.layers] == ["größe", "層", "naïve 層-1", "loss"]
    stage = build_stage(graph, ["層", "naïve 層-1"])
    assert list(stage.state_dict()) == [
        "層.weight",
        "層.bias",
        "naïve 層-1.weight",
        "naïve 層-1.bias",
    ]
    batch = _rows(5)
    assert_same(
        run_model(graph, batch, F.cross_entropy),
        run_split(graph, batch, cut_evenly(graph, 4), None),
    )


def test_a_single_layer() -> None:
    graph = capture(nn.Linear(6, 4), _rows(), F.cross_entropy)
    assert [layer.op for layer in graph.layers] == ["aten.linear", "loss"]
    assert_same(
        *(run_split(graph, _rows_of(3), cut_evenly(graph, stages), None) for stages in (1, 2))
    )


def test_a_loss_that_is_a_module_is_no_part_of_the_model() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    graph = capture(nn.Linear(6, 4), _rows(), loss)
    batch = _rows(6)
    assert_same(run_model(graph, batch, loss), run_split(graph, batch, cut_evenly(graph, 2), None))
    assert list(build_stage(graph, ["loss"]).state_dict()) == []


def _rows_of(seed: int) -> Batch:
    torch.manual_seed(seed)
    return _rows()


def test_a_model_that_computes_nan_is_profiled(tmp_path: Path) -> None:
    """Its times are as good as any."""
    path = tmp_path / "net.py"
    source = (
        MODULE
        + "    def forward(self, x): return self.a(x) * float('nan')\ndef build_model(): return M()"
        + ROWS
    )
    path.write_text(HEAD + source, encoding="utf-8")
    profile = profile_model(load_model_file(path), 4, ProfilingOptions(repeats=2, seconds=0.1))
    assert all(layer.forward_s > 0 for layer in profile.layers)


@pytest.mark.slow
def test_a_chain_of_5000_layers() -> None:
    """Capture, stages and what they exchange grow with the layers, not with their square."""
    model = nn.Sequential(
        *(nn.Linear(6, 6) if index % 2 == 0 else nn.Tanh() for index in range(4999)),
        nn.Linear(6, 4),
    )
    graph = capture(model, _rows(), F.cross_entropy)
    assert len(graph.layers) == 5001
    assert len(graph.edges) == 5000
    batch = _rows(6)
    whole = run_split(graph, batch, cut_evenly(graph, 1), None)
    assert_same(whole, run_split(graph, batch, cut_evenly(graph, 7), None))
