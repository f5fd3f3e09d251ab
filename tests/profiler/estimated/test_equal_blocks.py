"""Of equal blocks few run, and the estimate is as if all did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.formats.profile import Profile
from planner.model.capture.graph import LayerGraph
from planner.profiler.estimated import trace
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.profiler.estimated.trace import trace_step
from tests.profiler.estimated import test_divided as divided
from tests.profiler.estimated.test_divided import PLAN, WIDTH, spec

BLOCKS = 8


class Model(divided.Model):
    """An embedding, equal blocks and a head, which subclasses change."""

    def __init__(self) -> None:
        super().__init__(BLOCKS)


class Tied(Model):
    """Head and embedding share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Shared(Model):
    """All blocks share one weight."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]


class Frozen(Model):
    """The weights of one block are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].requires_grad_(requires_grad=False)


class FrozenInTurn(Model):
    """The weights of each second block are not trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in list(self.blocks)[1::2]:
            block.requires_grad_(requires_grad=False)


class Summing(Model):
    """A sum of what the blocks return goes along with them."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        sums = x
        for block in self.blocks:
            x = block(x)
            sums = sums + x
        result: Tensor = self.head(sums)
        return result


class Collecting(Model):
    """The head takes what every block returns, so that each is used elsewhere, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        values = [self.embedding(tokens)]
        for block in self.blocks:
            values.append(block(values[-1]))
        result: Tensor = self.head(torch.stack(values).sum(0))
        return result


class TiedPairs(Model):
    """Each second block has the weights of the block before it."""

    def __init__(self) -> None:
        super().__init__()
        for first in range(0, BLOCKS, 2):
            self.blocks[first + 1].up = self.blocks[first].up


@contextmanager
def whole(graph: LayerGraph) -> Iterator[tuple[LayerGraph, list[int]]]:
    yield graph, list(range(len(graph.layers)))


def numbers(profile: Profile) -> dict[str, Any]:
    return profile.model_copy(update={"provenance": None}).model_dump()


def about(expected: Any) -> Any:
    """Let numbers differ by rounding, because sums are taken in another order."""
    if isinstance(expected, dict):
        return {name: about(value) for name, value in expected.items()}
    if isinstance(expected, list | tuple):
        return type(expected)(map(about, expected))
    return pytest.approx(expected, rel=1e-9) if isinstance(expected, float) else expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "spared"),
    [
        (Model, 3),
        (Tied, 3),
        (Shared, 0),
        (Summing, 3),
        (Frozen, 0),
        (FrozenInTurn, 2),
        (Collecting, 0),
        (TiedPairs, 0),
    ],
)
def test_an_estimate_is_as_if_all_blocks_had_run(
    model: type[Model], spared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_spec = spec(build_model=model, tensor_parallel_plan=lambda: PLAN)
    options = EstimateOptions("a100", tensor=(2,) if model is Model else ())
    traced = trace_step(training_spec, 4)
    layers = sum(layer.name.startswith("blocks.1.") for layer in traced.graph.layers)
    assert len(traced.graph.layers) - len(set(traced.stands)) == spared * layers
    found = estimate_profile(training_spec, 4, options)
    monkeypatch.setattr(trace, "abridged", whole)
    assert numbers(found) == about(numbers(estimate_profile(training_spec, 4, options)))


def test_a_graph_that_served_is_as_it_was() -> None:
    training_spec = spec(build_model=Model)
    first = trace_step(training_spec, 4)
    names = [[node.name for node in layer.nodes] for layer in first.graph.layers]
    inputs = {node: node.all_input_nodes for layer in first.graph.layers for node in layer.nodes}
    second = trace_step(training_spec, 8, like=first)
    assert second.graph is first.graph
    assert [[node.name for node in layer.nodes] for layer in second.graph.layers] == names
    assert {node: node.all_input_nodes for node in inputs} == inputs
    assert second.saved_bytes == trace_step(training_spec, 8).saved_bytes
    for node in inputs:
        assert all(node in source.users for source in node.all_input_nodes)


def test_blocks_of_other_sizes_run_all() -> None:
    class Growing(Model):
        def __init__(self) -> None:
            super().__init__()
            for number, block in enumerate(self.blocks):
                size = WIDTH * (number + 1)
                block.up, block.down = nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)

    traced = trace_step(spec(build_model=Growing), 4)
    assert list(traced.stands) == list(range(len(traced.graph.layers)))
