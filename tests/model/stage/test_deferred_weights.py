"""Models built without memory for their weights: every stage makes its own, the same in any plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.errors import ModelFileError
from planner.executor.observe.memory import _resident_bytes
from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.stage.deferred_weights import build_deferred, is_deferred, materialize, without_storage
from planner.model.stage.stage import build_stage
from tests.model.architectures import ARCHITECTURES
from tests.model.models import Case
from tests.model.splitting import assert_same, cut_evenly, run_split

SEED = 5


class Encoder(nn.Module):
    """Deep copies of a layer, values given in a loop afterwards, a buffer computed, a parameter drawn and scaled."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.start = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 10)
        self.register_buffer("waves", torch.sin(torch.arange(8.0)))
        self.register_buffer("noise", torch.rand(8))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        with torch.no_grad():
            self.start.mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :24].reshape(-1, 3, 8) + self.start + self.get_buffer("waves") + self.get_buffer("noise")
        scores: Tensor = self.head(self.encoder(x).mean(1))
        return scores


CASES = {name: ARCHITECTURES[name] for name in ("vgg", "resnet", "mixed", "gpt2", "gnmt")}
CASES["encoder"] = Case(Encoder, ARCHITECTURES["vgg"].batch, ARCHITECTURES["vgg"].loss)


def _deferred_graph(case: Case) -> LayerGraph:
    model = build_deferred(case.build, SEED)
    with without_storage(model):
        return capture(model, case.batch(4), case.loss)


@pytest.mark.parametrize("name", CASES)
def test_weights_do_not_depend_on_the_plan(name: str) -> None:
    case = CASES[name]
    graph = _deferred_graph(case)
    materialize(graph.model, case.build, SEED, {n for n, _ in graph.model.named_parameters()})
    assert not is_deferred(graph.model)
    whole = dict(graph.model.named_parameters(remove_duplicate=False))
    for stages in (3, 7):
        for names in cut_evenly(graph, stages):
            wanted = graph.names_of([n for layer in graph.layers if layer.name in names for n in layer.parameters])
            part = build_deferred(case.build, SEED)
            materialize(part, case.build, SEED, set(wanted))
            for key, parameter in part.named_parameters(remove_duplicate=False):
                assert parameter.is_meta == (key not in wanted), key
                assert parameter.is_meta or torch.equal(parameter, whole[key]), key
            for key, buffer in part.named_buffers():
                assert torch.equal(buffer, graph.model.get_buffer(key)), key


def test_a_stage_holds_no_other_weights() -> None:
    case = CASES["vgg"]
    graph = _deferred_graph(case)
    materialize(graph.model, case.build, SEED, {"classifier.3.weight", "classifier.3.bias"})
    state = build_stage(graph, ["classifier.2", "classifier.3", "classifier.4"]).state_dict()
    assert list(state) == ["classifier.3.weight", "classifier.3.bias"]
    assert not any(tensor.is_meta for tensor in state.values())


@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_that_of_the_model_built_whole(name: str) -> None:
    case = CASES[name]
    deferred = _deferred_graph(case)
    assert is_deferred(deferred.model)
    built = capture(case.build(), case.batch(4), case.loss)
    assert deferred.hash == built.hash
    materialize(deferred.model, case.build, SEED, {n for n, _ in deferred.model.named_parameters()})
    with torch.no_grad():
        for mine, theirs in zip(built.model.parameters(), deferred.model.parameters(), strict=True):
            mine.copy_(theirs)
        for mine_buffer, theirs_buffer in zip(built.model.buffers(), deferred.model.buffers(), strict=True):
            mine_buffer.copy_(theirs_buffer)
    batch = case.batch(6)
    steps = [run_split(graph, batch, cut_evenly(graph, 3), (1, 2, 3)) for graph in (deferred, built)]
    assert_same(*steps)


def test_weights_are_spread_as_the_constructor_spreads_them() -> None:
    model = build_deferred(Encoder, SEED)
    materialize(model, Encoder, SEED, {name for name, _ in model.named_parameters()})
    assert isinstance(model, Encoder)
    weight = model.head.weight.detach()
    bound = (6 / (8 + 10)) ** 0.5
    assert bound / 2 < weight.abs().max() <= bound
    assert torch.equal(model.encoder.layers[0].norm1.weight, torch.ones(8))
    assert 0.01 < model.start.std() < 0.3
    # Copies of one layer get values of their own afterwards, another seed gives others.
    first, second = (layer.linear1.weight for layer in model.encoder.layers)
    assert not torch.equal(first, second)
    other = build_deferred(Encoder, SEED + 1)
    materialize(other, Encoder, SEED + 1, {"head.weight"})
    assert not torch.equal(other.get_parameter("head.weight"), weight)


def test_the_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    build_deferred(Encoder, SEED)
    assert torch.equal(torch.get_rng_state(), state)


def test_large_weights_take_no_memory() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2**14, 2**14) for _ in range(40)), nn.Linear(2**14, 10))  # 43 GB

    before = _resident_bytes()
    model = build_deferred(build, SEED)
    materialize(model, build, SEED, {"40.weight"})
    with without_storage(model):
        batch = Batch((torch.randn(4, 2**14),), {}, torch.randint(0, 10, (4,)))
        graph = capture(model, batch, nn.functional.cross_entropy)
    assert len(graph.layers) == 42
    assert _resident_bytes() - before < 300e6


def _reads(model: nn.Module) -> None:
    if model.get_parameter("weight").sum() > 0:
        model.requires_grad_(False)


def _made_of_another(model: nn.Module) -> None:
    model.copy = nn.Parameter(model.get_parameter("weight") * 2)


@pytest.mark.parametrize(
    ("change", "words"), [(_reads, "reads its weights"), (_made_of_another, "'copy' is made from")]
)
def test_constructors_that_need_the_weights(change: Callable[[nn.Module], None], words: str) -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        change(model)
        return model

    with pytest.raises(ModelFileError, match=words) as caught:
        materialize(build_deferred(build, SEED), build, SEED, {"copy"})
    assert "`defer_weights`" in caught.value.hint
