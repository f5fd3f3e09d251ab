"""Weight stashing equals weights kept by hand."""

from __future__ import annotations

import copy

import torch
from torch import nn

from planner.executor.stage.versions import WeightVersions


def make_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_a_backward_sees_the_weights_of_its_forward() -> None:
    """Two forwards, an update, then both backwards: the second's gradient must be that of the old
    weights.
    """
    first = nn.Sequential(make_layer(), nn.Tanh(), nn.Linear(2, 2))
    inputs = [torch.randn(4, 3), torch.randn(4, 3)]
    kept = copy.deepcopy(first)
    versions = WeightVersions(list(first.parameters()))
    optimizer = torch.optim.SGD(first.parameters(), lr=0.5)
    outputs = []
    for unit, sample in enumerate(inputs):
        versions.stash(unit)
        outputs.append(first(sample).square().sum())
    with versions.restored(0):
        outputs[0].backward()
    versions.update(optimizer.step)
    optimizer.zero_grad()
    updated = [parameter.detach().clone() for parameter in first.parameters()]
    with versions.restored(1):
        outputs[1].backward()
    kept(inputs[1]).square().sum().backward()
    for parameter, reference, newest in zip(
        first.parameters(), kept.parameters(), updated, strict=True
    ):
        assert parameter.grad is not None
        assert reference.grad is not None
        assert torch.equal(parameter.grad, reference.grad)
        assert torch.equal(parameter, newest), "the newest weights are back after the backward"


def test_an_update_that_nobody_waits_for_stays_in_place() -> None:
    layer = make_layer()
    versions = WeightVersions(list(layer.parameters()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    storage = layer.weight.data_ptr()
    for unit in range(3):
        versions.stash(unit)
        loss = layer(torch.ones(1, 3)).sum()
        with versions.restored(unit):
            loss.backward()
        versions.update(optimizer.step)
    assert layer.weight.data_ptr() == storage
    assert versions.most_versions == 1


def test_storage_of_versions_that_had_their_day_is_reused() -> None:
    """A pipeline of depth 3 needs three versions at most, however long it runs."""
    layer = make_layer()
    versions = WeightVersions(list(layer.parameters()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    for unit in range(20):
        if unit >= 3:
            with versions.restored(unit - 3):
                torch.autograd.backward(losses.pop(unit - 3))
            versions.update(optimizer.step)
            optimizer.zero_grad()
        versions.stash(unit)
        losses[unit] = layer(torch.ones(1, 3)).sum()
        seen.add(layer.weight.data_ptr())
    assert versions.most_versions == 3
    assert len(seen) == 3


def test_momentum_and_adam_state_follow_the_newest_version() -> None:
    """Optimizer state is not stashed: steps act on the newest weights, as if nothing were in
    flight.
    """
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1),
    ):
        stashed, plain = make_layer(), make_layer()
        versions = WeightVersions(list(stashed.parameters()))
        optimizers = [make(list(layer.parameters())) for layer in (stashed, plain)]
        for unit in range(5):
            versions.stash(unit)  # never released, so every update needs other storage
            for layer in (stashed, plain):
                for parameter in layer.parameters():
                    parameter.grad = torch.full_like(parameter, unit + 1.0)
            versions.update(optimizers[0].step)
            optimizers[1].step()
        assert torch.equal(stashed.weight, plain.weight)
        assert versions.most_versions == 6


def test_a_forward_may_use_the_version_before_the_newest_and_two_are_enough() -> None:
    """As 2bw does: minibatch t at the version that t - 2 left, one update after each, the next
    one's forward before.
    """
    layer = make_layer()
    versions = WeightVersions(list(layer.parameters()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    history = [layer.weight.detach().clone()]
    for minibatch in range(6):
        versions.stash(minibatch, max(0, minibatch - 1))
        with versions.stashed(minibatch):
            assert torch.equal(layer.weight, history[max(0, minibatch - 1)])
            loss = layer(torch.ones(1, 3)).square().sum()
        assert torch.equal(layer.weight, history[-1]), (
            "the newest weights are back after the forward"
        )
        with versions.restored(minibatch):
            torch.autograd.backward(loss)
        versions.update(optimizer.step, kept=(minibatch,))
        optimizer.zero_grad()
        history.append(layer.weight.detach().clone())
    assert versions.most_versions == 2
