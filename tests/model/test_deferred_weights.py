"""Models built without memory for their weights: every stage makes its own, the same in any
plan.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planner.errors import ModelFileError
from planner.model import deferred_weights
from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.deferred_weights import (
    DeferredModel,
    allocate,
    is_deferred,
    without_storage,
)
from planner.model.stage.stage import build_stage
from planner.profiler.this_machine import status_bytes
from tests.model.architectures import ARCHITECTURES
from tests.model.models import Case
from tests.model.splitting import assert_same, cut_evenly, run_split

SEED = 5


class Encoder(nn.Module):
    """Deep copies of a layer, values given in a loop afterwards, a buffer computed, a parameter
    drawn and scaled.
    """

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
        x = (
            x.flatten(1)[:, :24].reshape(-1, 3, 8)
            + self.start
            + self.get_buffer("waves")
            + self.get_buffer("noise")
        )
        scores: Tensor = self.head(self.encoder(x).mean(1))
        return scores


CASES = {name: ARCHITECTURES[name] for name in ("vgg", "resnet", "mixed", "gpt2", "gnmt")}
CASES["encoder"] = Case(Encoder, ARCHITECTURES["vgg"].batch, ARCHITECTURES["vgg"].loss)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all tensors off, the small ones of these models, too."""
    monkeypatch.setattr(deferred_weights, "LEAST_BYTES", 1)


def _materialized(
    build: Callable[[], nn.Module], names: Collection[str], seed: int = SEED
) -> nn.Module:
    torch.manual_seed(seed)
    deferred = DeferredModel(build)
    deferred.materialize(names)
    return deferred.model


def _captured(case: Case, model: nn.Module) -> LayerGraph:
    with without_storage(model):
        return capture(model, case.batch(4), case.loss)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_model_built_whole(name: str) -> None:
    """Those of any stage, and the buffers, to the bit; the generator goes as far."""
    case = CASES[name]
    torch.manual_seed(SEED)
    whole = case.build()
    state = torch.get_rng_state()
    built = dict(whole.named_parameters(remove_duplicate=False))
    graph = _captured(case, DeferredModel(case.build).model)
    for names in cut_evenly(graph, 3):
        wanted = graph.names_of(
            [n for layer in graph.layers if layer.name in names for n in layer.parameters]
        )
        part = _materialized(case.build, wanted)
        assert torch.equal(torch.get_rng_state(), state)
        for key, parameter in part.named_parameters(remove_duplicate=False):
            assert parameter.is_meta == (key not in wanted), key
            assert parameter.is_meta or torch.equal(parameter, built[key]), key
            assert parameter.stride() == built[key].stride()
        for key, buffer in part.named_buffers():
            assert torch.equal(buffer, whole.get_buffer(key)), key


def test_a_stage_holds_no_other_weights() -> None:
    case = CASES["vgg"]
    deferred = DeferredModel(case.build)
    graph = _captured(case, deferred.model)
    deferred.materialize({"classifier.3.weight", "classifier.3.bias"})
    state = build_stage(graph, ["classifier.2", "classifier.3", "classifier.4"]).state_dict()
    assert list(state) == ["classifier.3.weight", "classifier.3.bias"]
    assert not any(tensor.is_meta for tensor in state.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_that_of_the_model_built_whole(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(SEED)
    deferred = DeferredModel(case.build)
    graph = _captured(case, deferred.model)
    assert is_deferred(graph.model)
    torch.manual_seed(SEED)
    built = capture(case.build(), case.batch(4), case.loss)
    assert graph.hash == built.hash
    deferred.materialize(graph.model.state_dict().keys())
    assert not is_deferred(graph.model)
    batch = case.batch(6)
    steps = [run_split(each, batch, cut_evenly(each, 3), (1, 2, 3)) for each in (graph, built)]
    assert_same(*steps)


class Drawn(nn.Module):
    """Every way to draw: of Python's and NumPy's generators, of one of its own, in place, through a
    view, by QR.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skewed = nn.Parameter(torch.empty(7, 5).t())
        self.skewed.data.normal_()
        with torch.no_grad():
            self.skewed[1:3, ::2].uniform_(-1, 1)
            self.skewed[0] = torch.randn(7)
        self.turned = nn.Parameter(torch.empty(4, 6))
        nn.init.orthogonal_(self.turned)
        self.cut = nn.Parameter(torch.empty(33))
        nn.init.trunc_normal_(self.cut)
        own = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.randn(17, generator=own).exponential_(generator=own))
        self.like = nn.Parameter(torch.rand_like(self.cut))
        self.python = nn.Parameter(torch.tensor([random.random(), np.random.rand()]))
        self.register_buffer("mask", torch.bernoulli(torch.full((9,), 0.5)))
        self.last = nn.Linear(3, 5, dtype=torch.float64)


def _seed_others() -> None:
    random.seed(1)
    np.random.seed(2)


@pytest.mark.parametrize(
    "name", ["skewed", "turned", "cut", "own", "like", "python", "last.weight"]
)
def test_every_way_to_draw(name: str) -> None:
    _seed_others()
    torch.manual_seed(SEED)
    whole = Drawn()
    next_numbers = random.random(), np.random.rand()
    _seed_others()
    part = _materialized(Drawn, {name})
    assert torch.equal(part.get_parameter(name), whole.get_parameter(name))
    assert torch.equal(part.get_buffer("mask"), whole.get_buffer("mask"))
    assert (random.random(), np.random.rand()) == next_numbers


def test_another_seed_gives_other_weights() -> None:
    first, other = (_materialized(Encoder, {"head.weight"}, seed) for seed in (SEED, SEED + 1))
    assert not torch.equal(first.get_parameter("head.weight"), other.get_parameter("head.weight"))


def test_large_weights_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def build() -> nn.Module:
        # 671 MB
        return nn.Sequential(*(nn.Linear(2**11, 2**11) for _ in range(40)), nn.Linear(2**11, 10))

    before = status_bytes("VmRSS")
    deferred = DeferredModel(build)
    deferred.materialize({"40.weight"})
    with without_storage(deferred.model):
        batch = Batch((torch.randn(4, 2**11),), {}, torch.randint(0, 10, (4,)))
        graph = capture(deferred.model, batch, nn.functional.cross_entropy)
    assert len(graph.layers) == 42
    assert status_bytes("VmRSS") - before < 300e6


def _reads(model: nn.Module) -> None:
    if model.get_parameter("weight").sum() > 0:
        model.requires_grad_(False)


def _samples_by_values(model: nn.Module) -> None:
    model.register_buffer("chosen", torch.multinomial(model.get_parameter("bias").abs(), 1))


def _reads_by_numpy(model: nn.Module) -> None:
    model.get_parameter("weight").detach().numpy().sum()


@pytest.mark.parametrize("change", [_reads, _samples_by_values, _reads_by_numpy])
def test_constructors_that_need_the_weights(change: Callable[[nn.Module], None]) -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        change(model)
        return model

    with pytest.raises(ModelFileError, match="reads its weights") as caught:
        DeferredModel(build)
    assert "`defer_weights`" in caught.value.hint


class Related(nn.Module):
    """Weights and a buffer that are made of other weights, before and after these are changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Parameter(self.first.weight.detach() * 2)
        with torch.no_grad():
            self.first.weight.mul_(0.1)
        self.register_buffer("start", self.first.weight.detach() + 1)
        self.copied = copy.deepcopy(self.get_buffer("start"))
        self.table = nn.Parameter(torch.from_numpy(np.arange(6.0)))
        with torch.no_grad():
            self.first.bias.copy_(torch.from_numpy(np.ones(4)))


@pytest.mark.parametrize("names", [{"twice"}, {"first.weight", "table"}, {"first.bias"}, set()])
def test_values_made_of_others(names: set[str]) -> None:
    torch.manual_seed(SEED)
    whole = Related()
    part = _materialized(Related, names)
    for name in names:
        assert torch.equal(part.get_parameter(name), whole.get_parameter(name))
    assert torch.equal(part.get_buffer("start"), whole.get_buffer("start"))


def test_nothing_is_drawn_for_weights_from_files() -> None:
    state = torch.get_rng_state()
    deferred = DeferredModel(ARCHITECTURES["gpt2"].build, draw=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert not deferred.draws_buffers
    assert DeferredModel(Encoder, draw=False).draws_buffers


class Initialised(nn.Module):
    """Initial values by PyTorch's functions, which reject samples, permute and decompose; by
    conversion and parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Linear(9, 7)
        nn.init.trunc_normal_(self.cut.weight, std=0.02)
        self.far = nn.Parameter(nn.init.trunc_normal_(torch.empty(40), 0.0, 1.0, -0.1, 0.2))
        self.turned = nn.Linear(6, 6)
        nn.init.orthogonal_(self.turned.weight)
        self.sparse = nn.Linear(8, 5)
        nn.init.sparse_(self.sparse.weight, 0.3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
        self.short = nn.Linear(3, 4).to(torch.bfloat16)
        self.joined = nn.Parameter(torch.cat([torch.zeros(2, 9), self.cut.weight.detach()]))
        self.token = nn.Embedding(5, 4, padding_idx=3)
        self.last = nn.GRU(4, 3, 2, bidirectional=True)
        self.apply(self._scaled)

    def _scaled(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.normal_(0.0, 0.1 / math.sqrt(module.out_features))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_initial_values_by_functions_of_pytorch(every: int) -> None:
    torch.manual_seed(SEED)
    whole = Initialised()
    names = list(dict(whole.named_parameters()))[::every]
    part = _materialized(Initialised, names)
    for name in names:
        assert torch.equal(part.get_parameter(name), whole.get_parameter(name)), name


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        for each in (self.first, self.second):
            bias: Any = each.bias
            bias._no_weight_decay = True


def test_parameters_keep_the_attributes_by_which_an_optimizer_groups() -> None:
    def marked(model: nn.Module) -> set[str]:
        return {
            name for name, each in model.named_parameters() if getattr(each, "_no_weight_decay", 0)
        }

    deferred = DeferredModel(Marked)
    expected = {"first.bias", "second.bias"}
    assert marked(deferred.model) == expected
    with without_storage(deferred.model):
        assert marked(deferred.model) == expected
    deferred.materialize({"first.bias"})
    assert marked(deferred.model) == expected
    allocate(deferred.model, {"second.bias"})
    assert not deferred.model.get_parameter("second.bias").is_meta
    assert marked(deferred.model) == expected


def test_attributes_whose_values_are_put_off_are_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Linear(256, 256)
            weight: Any = self.large.weight
            weight.mask = torch.rand(256, 256)

    with pytest.raises(ModelFileError, match=r"of shape \(256, 256\) has a tensor as an attribute"):
        DeferredModel(Masked)
