"""Recurrent weights lie in one piece of memory, on a CPU whose PyTorch is told that cuDNN takes its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.backends.cudnn import rnn
from torch.nn import functional as F

from planner.executor.stage.versions import WeightVersions
from planner.model.batch import Batch
from planner.model.capture.blocks import capture_blocks
from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.stage.stage import StageModule, build_stage

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
MODES = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")


class Net(nn.Module):
    """A stacked LSTM both ways with projections, a GRU that is called twice, and an Elman layer without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.lstm = nn.LSTM(6, 6, 2, bidirectional=True, proj_size=3, batch_first=True)
        self.gru = nn.GRU(6, 6)
        self.plain = nn.RNN(6, 6, nonlinearity="relu", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(self.first(x))[0]
        made: Tensor = self.plain(self.gru(self.gru(x)[0])[0])[0]
        return made


class Flattened:
    """Stands for torch._cudnn_rnn_flatten_weight: it moves the weights as that does, and notes its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, weights: Sequence[Tensor], *arguments: int) -> Tensor:
        self.calls.append((len(weights), *arguments))
        buffer = torch.cat([weight.reshape(-1) for weight in weights])
        start = 0
        for weight in weights:
            shape = weight.shape
            weight.set_(buffer[start : start + weight.numel()].view(shape))  # type: ignore[call-overload]
            start += weight.numel()
        return buffer


@pytest.fixture
def flattened(monkeypatch: pytest.MonkeyPatch) -> Flattened:
    stand_in = Flattened()
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", stand_in)
    monkeypatch.setattr(cudnn, "is_acceptable", lambda _: True)
    monkeypatch.setattr(rnn, "get_cudnn_mode", MODES.index)
    return stand_in


def _batch() -> Batch:
    return Batch((torch.randn(3, 5, 4),), {}, torch.randn(3, 5, 6))


def _stage(graph: LayerGraph) -> StageModule:
    return build_stage(graph, [layer.name for layer in graph.layers])


def _in_one_piece(stage: StageModule, layer: str) -> bool:
    return len({p.untyped_storage().data_ptr() for n, p in stage.named_parameters() if n.startswith(layer)}) == 1


def test_weights_are_joined_where_the_stage_goes(flattened: Flattened) -> None:
    torch.manual_seed(0)
    model, batch = Net(), _batch()
    expected = F.mse_loss(model(*batch.args), batch.target)
    stage = _stage(capture(model, batch, F.mse_loss))
    names = [name for name, _ in stage.named_parameters()]
    parameters = list(stage.parameters())
    assert not _in_one_piece(stage, "lstm")
    stage.to(torch.device("cpu"))
    assert flattened.calls == [
        (20, 5, 6, MODES.index("LSTM"), 6, 3, 2, True, True),
        (4, 4, 6, MODES.index("GRU"), 6, 0, 1, False, False),
        (2, 2, 6, MODES.index("RNN_RELU"), 6, 0, 1, False, False),
    ]
    assert all(_in_one_piece(stage, layer) for layer in ("lstm", "gru", "plain"))
    assert [name for name, _ in stage.named_parameters()] == names
    assert all(one is other for one, other in zip(stage.parameters(), parameters, strict=True))
    assert torch.equal(stage(batch, {})["loss"], expected)


def test_every_version_of_the_weights_is_in_one_piece(flattened: Flattened) -> None:
    torch.manual_seed(0)
    model, batch = Net(), _batch()
    graph = capture(model, batch, F.mse_loss)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    results = []
    for arranged in (False, True):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        stage = _stage(graph).to(torch.device("cpu"))
        parameters = list(stage.parameters())
        versions = WeightVersions(parameters, stage.arrange) if arranged else WeightVersions(parameters)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        losses = []
        for step in range(3):
            for unit in (2 * step, 2 * step + 1):
                versions.stash(unit)
                losses.append(stage(batch, {})["loss"])
            for unit in (2 * step, 2 * step + 1):
                optimizer.zero_grad()
                with versions.restored(unit):
                    assert not arranged or _in_one_piece(stage, "lstm")
                    losses[unit].backward()
                versions.update(optimizer.step)
        assert versions.most_versions == 2
        results.append([loss.detach() for loss in losses])
    assert torch.equal(torch.stack(results[0]), torch.stack(results[1]))


def test_modules_of_blocks_are_joined(flattened: Flattened) -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.gru(x)[0]
            return made

    model = nn.Sequential(nn.Linear(4, 4), Only())
    graph = capture_blocks(model, list(model), _batch(), F.mse_loss)
    stage = _stage(graph).to(torch.device("cpu"))
    assert len(flattened.calls) == 1
    assert _in_one_piece(stage, "1.gru")
    assert len({parameter.untyped_storage().data_ptr() for parameter in model[1].parameters()}) == 1


def test_a_cpu_moves_nothing() -> None:
    stage = _stage(capture(Net(), _batch(), F.mse_loss))
    places = [parameter.data_ptr() for parameter in stage.parameters()]
    assert [parameter.data_ptr() for parameter in stage.to(torch.device("cpu")).parameters()] == places
