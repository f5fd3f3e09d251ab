"""Models in 3 and 7 stages against the user's own model: everything equal to the bit, in both
modes.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.stage.evaluation import matching_cut
from tests.model.architectures import ARCHITECTURES
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split


@cache
def _graphs(name: str) -> tuple[LayerGraph, LayerGraph]:
    """For training and for evaluation, of one model."""
    case = ARCHITECTURES[name]
    torch.manual_seed(1)
    model = case.build()
    training = capture(model, case.batch(4), case.loss)
    return training, capture(model.eval(), case.batch(4), case.loss)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("batch_size", [4, 6])
@pytest.mark.parametrize("stages", [3, 7])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_in_stages(name: str, stages: int, batch_size: int) -> None:
    graph, _ = _graphs(name)
    torch.manual_seed(2)
    batch = ARCHITECTURES[name].batch(batch_size)
    graph.model.train()
    torch.manual_seed(4)
    whole = run_model(graph, batch, ARCHITECTURES[name].loss)
    state = torch.get_rng_state()
    torch.manual_seed(4)
    split = run_split(graph, batch, cut_evenly(graph, stages), None)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(whole, split)


@pytest.mark.parametrize("batch_size", [4, 6])
@pytest.mark.parametrize("stages", [3, 7])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_evaluation_in_the_stages_of_training(name: str, stages: int, batch_size: int) -> None:
    training, graph = _graphs(name)
    torch.manual_seed(2)
    batch = ARCHITECTURES[name].batch(batch_size)
    cut = matching_cut(training, cut_evenly(training, stages), graph)
    assert [layer for names in cut for layer in names] == [layer.name for layer in graph.layers]
    graph.model.eval()
    state = torch.get_rng_state()
    whole = run_model(graph, batch, ARCHITECTURES[name].loss)
    split = run_split(graph, batch, [names for names in cut if names], None)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(whole, split)
    for buffer_name, buffer in graph.model.named_buffers():
        assert torch.equal(split.buffers[buffer_name], buffer)


def test_both_graphs_share_the_parameters() -> None:
    training, evaluation = _graphs("inception")
    assert training.model is evaluation.model
    assert training.hash != evaluation.hash
    # The auxiliary classifier runs in training alone; its weights stay where training put them.
    names = {layer.name for layer in training.layers} - {layer.name for layer in evaluation.layers}
    assert {name.split(".")[0] for name in names} == {"aux"}
