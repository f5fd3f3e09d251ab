"""Recurrent weights lie in one piece of memory, on a CPU whose PyTorch is told that cuDNN takes its
tensors.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.executor.stage.versions import WeightVersions
from planner.model.batch import Batch
from planner.model.capture.blocks import capture_blocks
from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.stage.stage import StageModule, build_stage

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Net(nn.Module):
    """A stacked LSTM both ways with projections, a GRU that is called twice, and an Elman layer
    without biases.
    """

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


def _flattened(monkeypatch: pytest.MonkeyPatch) -> list[nn.RNNBase]:
    """Return the modules whose weights are joined from now on, by a stand-in that moves them as
    cuDNN does.
    """
    calls: list[nn.RNNBase] = []

    def flatten(module: nn.RNNBase) -> None:
        calls.append(module)
        weights = [weight for weight in module._flat_weights if weight is not None]
        with torch.no_grad():
            buffer = torch.cat([weight.reshape(-1) for weight in weights])
            pieces = torch.split(buffer, [weight.numel() for weight in weights])
            for weight, piece in zip(weights, pieces, strict=True):
                weight.set_(piece.view(weight.shape))

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    return calls


def _batch() -> Batch:
    return Batch((torch.randn(3, 5, 4),), {}, torch.randn(3, 5, 6))


def _stage(graph: LayerGraph) -> StageModule:
    return build_stage(graph, [layer.name for layer in graph.layers])


def _in_one_piece(stage: StageModule, layer: str) -> bool:
    return (
        len(
            {
                p.untyped_storage().data_ptr()
                for n, p in stage.named_parameters()
                if n.startswith(layer)
            }
        )
        == 1
    )


def test_weights_are_joined_where_the_stage_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = Net(), _batch()
    expected = F.mse_loss(model(*batch.args), batch.target)
    stage = _stage(capture(model, batch, F.mse_loss))
    flattened = _flattened(monkeypatch)
    names = [name for name, _ in stage.named_parameters()]
    parameters = list(stage.parameters())
    assert not _in_one_piece(stage, "lstm")
    stage.to(torch.device("cpu"))
    assert flattened == [model.lstm, model.gru, model.plain]
    assert all(_in_one_piece(stage, layer) for layer in ("lstm", "gru", "plain"))
    assert [name for name, _ in stage.named_parameters()] == names
    assert all(one is other for one, other in zip(stage.parameters(), parameters, strict=True))
    assert torch.equal(stage(batch, {})["loss"], expected)


def test_every_version_of_the_weights_is_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = Net(), _batch()
    graph = capture(model, batch, F.mse_loss)
    _flattened(monkeypatch)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    results = []
    for arranged in (False, True):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        stage = _stage(graph).to(torch.device("cpu"))
        parameters = list(stage.parameters())
        versions = (
            WeightVersions(parameters, stage.arrange) if arranged else WeightVersions(parameters)
        )
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


def test_modules_of_blocks_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.gru(x)[0]
            return made

    model = nn.Sequential(nn.Linear(4, 4), Only())
    graph = capture_blocks(model, list(model), _batch(), F.mse_loss)
    flattened = _flattened(monkeypatch)
    stage = _stage(graph).to(torch.device("cpu"))
    assert flattened == [model[1].gru]
    assert _in_one_piece(stage, "1.gru")
    assert len({parameter.untyped_storage().data_ptr() for parameter in model[1].parameters()}) == 1


def test_a_cpu_moves_nothing() -> None:
    stage = _stage(capture(Net(), _batch(), F.mse_loss))
    places = [parameter.data_ptr() for parameter in stage.parameters()]
    assert [
        parameter.data_ptr() for parameter in stage.to(torch.device("cpu")).parameters()
    ] == places
