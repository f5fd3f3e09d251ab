"""Stages that hand everything to their neighbour compute what the unsplit model computes, gradients included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.model.capture.graph import LayerGraph
from planner.model.load import capture_file
from planner.model.spec import load_model_file
from planner.model.stage.chained import ChainedStage, cut_values
from planner.model.stage.stage import build_stage
from tests.executor.models import write_model

BATCH_SIZE = 3


def pipelined(graph: LayerGraph, stages: list[ChainedStage], received: tuple[Tensor, ...] = ()) -> Tensor:
    """Run the stages with a wire between them, as another system would, and their backwards; the loss."""
    stage, *later = stages
    output = stage(*received)
    if not later:
        (loss,) = output
        loss.backward()
        assert isinstance(loss, Tensor)
        return loss.detach()
    assert [tuple(t.shape) for t in output] == [tuple(t.shape) for t in stage.output_args]
    assert [t.requires_grad for t in output] == [t.requires_grad for t in later[0].input_args]
    assert all(tensor.is_contiguous() for tensor in output)
    wires = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in output)
    loss = pipelined(graph, later, wires)
    with_gradient = [(t, wire.grad) for t, wire in zip(output, wires, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in with_gradient], [gradient for _, gradient in with_gradient])
    return loss


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", ["language", "convolutional", "blocks"])
def test_equal_to_the_unsplit_model(model: str, recompute: bool, tmp_path: Path) -> None:
    spec = load_model_file(str(write_model(tmp_path, model, "sgd")))
    torch.manual_seed(0)
    batch = spec.example_batch(BATCH_SIZE)
    graph = capture_file(spec, batch)
    names = [layer.name for layer in graph.layers]
    whole = build_stage(graph, names)
    whole.set_random_key(5, 2, 1)
    loss = whole(batch, {})["loss"]
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in graph.model.named_parameters() if p.grad is not None}
    graph.model.zero_grad()
    third = max(1, len(names) // 3)
    cuts = [names[:third], names[third : 2 * third], names[2 * third :]]
    groups = [[cut[: len(cut) // 2], cut[len(cut) // 2 :]] if recompute and len(cut) > 1 else [] for cut in cuts]
    stages = [ChainedStage(graph, c, BATCH_SIZE, seed=5, recompute=g) for c, g in zip(cuts, groups, strict=True)]
    for stage in stages:
        stage.begin(2, {1: batch})
    assert torch.equal(pipelined(graph, stages), loss.detach())
    for name, parameter in graph.model.named_parameters():
        assert (parameter.grad is not None) == (name in gradients)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name])


def test_a_value_for_a_later_stage_is_handed_on(tmp_path: Path) -> None:
    spec = load_model_file(str(write_model(tmp_path, "language", "sgd")))
    graph = capture_file(spec, spec.example_batch(BATCH_SIZE))
    names = [layer.name for layer in graph.layers]
    position = len(names) // 2
    crossing = {spec.name for spec in cut_values(graph, position)}
    assert crossing == {e.value for e in graph.edges if graph.position[e.source] < position <= graph.position[e.target]}
