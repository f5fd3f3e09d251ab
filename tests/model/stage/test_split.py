"""A model in stages computes what the model computes, to the bit."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.loss import loss_of
from tests.model.chained import cut_values
from tests.model.models import CASES
from tests.model.splitting import assert_same, cut_evenly, run_split

KEY = (7, 3, 1)


@cache
def _graph(case: str) -> LayerGraph:
    torch.manual_seed(1)
    return capture(CASES[case].build(), CASES[case].batch(4), CASES[case].loss)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("batch_size", [4, 6, 1])
@pytest.mark.parametrize("stages", [3, 7, 1000])
@pytest.mark.parametrize("case", CASES)
def test_split_equals_unsplit(case: str, stages: int, batch_size: int) -> None:
    if batch_size == 1 and case in ("resnet", "shared norm"):
        pytest.skip("BatchNorm has no statistics of one sample")
    graph = _graph(case)
    torch.manual_seed(2)
    batch = CASES[case].batch(batch_size)
    whole = run_split(graph, batch, cut_evenly(graph, 1), KEY)
    torch.manual_seed(3)  # must not matter
    split = run_split(graph, batch, cut_evenly(graph, stages), KEY)
    assert_same(whole, split)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_unsplit_equals_the_users_model(case: str) -> None:
    torch.manual_seed(1)
    model = CASES[case].build().train()
    graph = capture(model, CASES[case].batch(4), CASES[case].loss)
    batch = CASES[case].batch(5)
    torch.manual_seed(4)
    # Without a key nothing is reseeded: both draw the same random numbers in the same order.
    step = run_split(graph, batch, cut_evenly(graph, 1), None)
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(4)
    loss = loss_of(model(*batch.args, **batch.kwargs), batch.target, CASES[case].loss)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(step.loss, loss.detach())
    for name, parameter in model.named_parameters():
        theirs = step.gradients[name]
        if parameter.grad is None:
            assert theirs is None, name
        else:
            assert theirs is not None
            assert torch.equal(theirs, parameter.grad), name
    for name, buffer in model.named_buffers():
        assert torch.equal(step.buffers[name], buffer), name


def test_random_numbers_differ_between_keys_and_layers() -> None:
    graph = _graph("vgg")
    batch = CASES["vgg"].batch(4)
    cut = cut_evenly(graph, 2)
    losses = {
        key: run_split(graph, batch, cut, key).loss.item()
        for key in [(7, 3, 1), (8, 3, 1), (7, 4, 1), (7, 3, 0)]
    }
    assert len(set(losses.values())) == len(losses)
    assert run_split(graph, batch, cut, (7, 3, 1)).loss.item() == losses[7, 3, 1]


def test_a_mask_is_made_by_each_stage_and_sent_by_none() -> None:
    """Where stages are cut between blocks, they exchange what the blocks exchange and
    nothing else.
    """
    graph = _graph("causal mask")
    ends = [layer.name for layer in graph.layers if "attention" in layer.name]
    assert len(ends) == 3
    for end in ends:
        sent = cut_values(graph, graph.position[end] + 1)
        assert [spec.shape(4) for spec in sent] == [(4, 12, 8)]
    assert {"arange", "masked_fill", "expand"} <= {node.name for node in graph.fixed}
