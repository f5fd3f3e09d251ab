"""Models that no tracer captures, as a sequence of blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CaptureError, ModelFileError, PlannerError
from planner.model.batch import Batch
from planner.model.capture.blocks import capture_blocks
from planner.model.capture.capture import capture, capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.options import ModuleOptions
from planner.model.spec import load_model_file
from planner.model.stage.evaluation import matching_cut
from planner.model.stage.stage import build_stage
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split


class Deeper(nn.Module):
    """Repeats a layer while the values are large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer(x))
        for _ in range(3):
            if x.abs().mean() < 0.4:
                break
            x = torch.tanh(self.again(x)) * 0.9
        result: Tensor = self.dropout(x)
        return result


class Split(nn.Module):
    """Hands on a dict: two views, a mask, a number and a string."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {
            "halves": x.chunk(2, 1),
            "mask": (x[:, :1] > 0).expand(-1, 3),
            "scale": 2,
            "note": "halves",
        }


class Join(nn.Module):
    """Takes them."""

    def forward(self, parts: dict[str, Any]) -> Tensor:
        left, right = parts["halves"]
        joined = torch.cat([torch.where(parts["mask"], left, right), right], 1)
        return joined * float(parts["scale"])


class First(nn.Bilinear):
    """Takes the batch's arguments."""

    def forward(self, input1: Tensor, other: Tensor) -> Tensor:
        return super().forward(input1, other)


class Net(nn.Module):
    """Several arguments, an in-place activation, weights tied across blocks, weights that nothing
    uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = First(6, 6, 6)
        deeper = Deeper()
        self.deeper = nn.ModuleList([deeper, Deeper()])
        self.act = nn.ReLU(inplace=True)
        self.split, self.join = Split(), Join()
        self.last = nn.Linear(6, 6)
        self.last.weight = deeper.layer.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, other: Tensor) -> Tensor:
        x = self.act(self.deeper[0](self.first(x, other=other)))
        scores: Tensor = self.last(self.deeper[1](self.join(self.split(x))))
        return scores


def _blocks(model: Net) -> list[nn.Module]:
    return [
        model.first,
        model.deeper[0],
        model.act,
        model.split,
        model.join,
        model.deeper[1],
        model.last,
    ]


def _batch(batch_size: int) -> Batch:
    kwargs = {"other": torch.randn(batch_size, 6)}
    return Batch((torch.randn(batch_size, 6),), kwargs, torch.randint(0, 6, (batch_size,)))


def _graph(*, training: bool = True, model: Net | None = None) -> LayerGraph:
    torch.manual_seed(1)
    model = model or Net()
    return capture_blocks(model.train(training), _blocks(model), _batch(4), F.cross_entropy)


def test_layers_are_the_blocks() -> None:
    graph = _graph()
    assert [(layer.name, layer.op) for layer in graph.layers] == [
        ("first", "First"),
        ("deeper.0", "Deeper+ReLU"),  # the activation changes its input in place
        ("split", "Split"),
        ("join", "Join"),
        ("deeper.1", "Deeper"),
        ("last", "Linear"),
        ("loss", "loss"),
    ]
    # Views of one memory, a value without gradient that repeats its memory.
    assert [spec.dtype for spec in graph.values.values()].count(torch.bool) == 1
    assert (
        next(spec for spec in graph.values.values() if spec.dtype is torch.bool).size_bytes(4) == 4
    )
    assert graph.tied_parameters == (("deeper.0.layer.weight", "last.weight"),)
    assert "unused.weight" in graph.layers[0].parameters


def test_no_tracer_captures_it() -> None:
    with pytest.raises(CaptureError, match="values of a tensor") as caught:
        capture(Net(), _batch(4), F.cross_entropy)
    assert "blocks(model)" in caught.value.hint


@pytest.mark.parametrize("batch_size", [4, 6, 3])
@pytest.mark.parametrize("stages", [1, 3, 7])
def test_stages_equal_the_model(stages: int, batch_size: int) -> None:
    graph = _graph()
    torch.manual_seed(2)
    batch = _batch(batch_size)
    torch.manual_seed(4)
    whole = run_model(graph, batch, F.cross_entropy)
    state = torch.get_rng_state()
    torch.manual_seed(4)
    split = run_split(graph, batch, cut_evenly(graph, stages), None)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(whole, split)
    keyed = [run_split(graph, batch, cut_evenly(graph, parts), (7, 3, 1)) for parts in (1, stages)]
    assert_same(*keyed)


def test_evaluation_shares_the_weights() -> None:
    training = _graph()
    assert isinstance(training.model, Net)
    graph = _graph(training=False, model=training.model)
    assert graph.hash == training.hash  # the mode is the blocks' own
    cut = matching_cut(training, cut_evenly(training, 3), graph)
    batch = _batch(5)
    training.model.eval()
    whole = run_model(graph, batch, F.cross_entropy)
    split = run_split(graph, batch, cut, None)
    assert_same(whole, split)
    # The stages of training go back to their own mode.
    torch.manual_seed(4)
    one = run_split(training, batch, cut_evenly(training, 3), None)
    assert not torch.equal(one.loss, split.loss)


def test_stages_hold_the_models_state_between_them() -> None:
    graph = _graph()
    state = graph.model.state_dict()
    parts = [build_stage(graph, names).state_dict() for names in cut_evenly(graph, 3)]
    assert {name for part in parts for name in part} == set(state)
    assert "deeper.1.layer.weight" not in parts[0]
    for part in parts:
        for name, tensor in part.items():
            assert tensor.data_ptr() == state[name].data_ptr()


def test_moving_a_stage_moves_what_its_blocks_see() -> None:
    graph = _graph()
    stage = build_stage(graph, ["deeper.1"]).to("meta")
    assert isinstance(graph.model, Net)
    assert {tensor.device.type for tensor in graph.model.deeper[1].state_dict().values()} == {
        "meta"
    }
    assert {tensor.device.type for tensor in stage.state_dict().values()} == {"meta"}


def test_capture_leaves_the_model_as_it_was() -> None:
    model = Net().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = _batch(4)
    state = torch.get_rng_state()
    graphs = [capture_blocks(model, _blocks(model), batch, F.cross_entropy) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len({graph.hash for graph in graphs}) == 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class _Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own


class _Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Returns(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(x)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (lambda model: [], "not a list of modules"),
        (lambda model: model[0], "not a list of modules"),
        (lambda model: [*model, torch.relu], "not a list of modules"),
        (lambda model: [model[0], _Wrapper(), model[1]], "of its own, 'own'"),
        (lambda model: [model[0]], "another loss than the model"),
        (lambda model: [model[0], nn.Tanh(), model[1]], "another loss than the model"),
        (
            lambda model: [model[0], nn.Conv2d(1, 1, 1, bias=False), model[1]],
            "of its own, 'weight'",
        ),
        (
            lambda model: [model[0], nn.Unflatten(1, (7, 7)), model[1]],
            "block 'blocks.1' fails: RuntimeError",
        ),
        (
            lambda model: [model[0], _Returns(_Opaque), _Returns(lambda o: o.x), model[1]],
            "cannot be sent",
        ),
        (
            lambda model: [model[0], _Returns(lambda x: (x, x.shape[0])), model[1]],
            "fails|another structure",
        ),
        (
            lambda model: [
                model[0],
                _Returns(lambda x: x.detach()),
                model[1],
                _Returns(lambda x: x.detach()),
            ],
            "loss",
        ),
    ],
)
def test_blocks_that_make_no_model(blocks: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    batch = Batch((torch.randn(4, 6),), {}, torch.randint(0, 4, (4,)))
    with pytest.raises(PlannerError, match=words) as caught:
        capture_blocks(model, blocks(model), batch, F.cross_entropy)
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_blocks_that_share_a_buffer_share_a_layer() -> None:
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, nn.Linear(6, 4))
    batch = Batch((torch.randn(4, 6),), {}, torch.randint(0, 4, (4,)))
    graph = capture_blocks(model, list(model), batch, F.cross_entropy)
    assert [(layer.name, layer.op) for layer in graph.layers] == [
        ("0", "Linear"),
        ("1", "BatchNorm1d+Linear+BatchNorm1d"),
        ("4", "Linear"),
        ("loss", "loss"),
    ]


def test_a_model_file_with_blocks_is_profiled(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom tests.model.capture.test_blocks import Deeper\n"
        "def build_model():\n    return nn.Sequential(nn.Linear(6, 6), Deeper(), Deeper(), "
        "nn.Linear(6, 4))\n"
        "def blocks(model):\n    return list(model)\n"
        "def example_batch(n):\n    return (torch.randn(n, 6),), torch.randint(0, 4, (n,))\n"
        "def loss(output, target):\n    return nn.functional.cross_entropy(output, target)\n",
        encoding="utf-8",
    )
    file = load_model_file(path)
    profile = profile_model(file, 8, ProfilingOptions(repeats=3, seconds=1))
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3", "loss"]
    assert profile.graph_hash == capture_file(file, file.example_batch(3)).hash
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers)
    assert [layer.saved_bytes > 0 for layer in profile.layers[:4]] == [True] * 4
    assert profile.layers[1].outputs[0].output_bytes == 8 * 6 * 4


def _half(model: nn.Module, blocks: list[nn.Module], kind: str) -> LayerGraph:
    batch = Batch((torch.randn(4, 6),), {}, torch.randint(0, 6, (4,)))
    return capture_blocks(
        model, blocks, batch, F.cross_entropy, options=ModuleOptions(torch.bfloat16, device=kind)
    )


def test_dtypes_under_autocast_are_those_of_the_device_that_trains() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    graphs = {kind: _half(model, list(model), kind) for kind in ("cpu", "cuda")}
    dtypes = {
        kind: [spec.dtype for spec in graph.values.values()] for kind, graph in graphs.items()
    }
    assert dtypes == {
        "cpu": [torch.bfloat16] * 3,
        "cuda": [torch.bfloat16, torch.float32, torch.bfloat16],
    }
    assert graphs["cpu"].hash == graphs["cuda"].hash


@pytest.mark.skipif(torch.cuda.is_available(), reason="then the blocks run there")
def test_blocks_that_decide_by_values_need_the_device() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Deeper(), nn.Linear(6, 6))
    assert _half(model, list(model), "cpu").hash
    with pytest.raises(ModelFileError, match="decide by values"):
        _half(model, list(model), "cuda")


class Running(nn.Module):
    """Subtracts a running mean, as it was before this batch; may draw a number of Python's or
    NumPy's.
    """

    mean: Tensor

    def __init__(self, draw: Callable[[], float] | None = None) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(6, 6), draw
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        result: Tensor = hidden - self.mean
        with torch.no_grad():
            self.mean = self.mean.lerp(hidden.mean(0), 0.5)
        return result if self.draw is None else result * self.draw()


@pytest.mark.parametrize("draw", [None, random.random, np.random.rand])
def test_each_run_that_is_compared_begins_alike(draw: Callable[[], float] | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Running(), nn.Tanh(), Running(draw))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    batch = Batch((torch.randn(4, 6),), {}, torch.randn(4, 6))

    graph = capture_blocks(model, list(model), batch, F.mse_loss)

    assert [layer.name for layer in graph.layers] == ["0", "1", "2", "loss"]
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
