"""Orders of samples: the sampler is one of PyTorch's, and needs nothing else of the package."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from planner.model.samplers import BucketSampler

LENGTHS = [random.Random(number).randint(1, 50) for number in range(203)]


def padded(order: list[int], size: int) -> int:
    """Elements of all microbatches that are padded to their longest sample."""
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return sum(len(part) * max(LENGTHS[index] for index in part) for part in parts)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_every_sample_once_in_an_order_of_each_epoch(microbatches: int) -> None:
    sampler = BucketSampler(LENGTHS, 5, microbatches, pool=3, seed=7)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert list(sampler) == orders[-1]
        assert sorted(orders[-1]) == list(range(len(LENGTHS)))
    assert orders[0] != orders[1] != orders[2]
    other = BucketSampler(LENGTHS, 5, microbatches, pool=3, seed=7)
    other.set_epoch(2)
    assert list(other) == orders[2]


def test_microbatches_of_a_minibatch_are_alike() -> None:
    order = list(BucketSampler(LENGTHS, 5, 4, pool=10))
    shuffled = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(0)).tolist()
    assert padded(order, 5) < 1.05 * sum(LENGTHS) + 5 * 50
    assert padded(order, 5) < 0.75 * padded(shuffled, 5)
    spreads = [
        max(LENGTHS[i] for i in order[start : start + 20])
        - min(LENGTHS[i] for i in order[start : start + 20])
        for start in range(0, 200, 20)
    ]
    assert max(spreads) <= 10


def test_a_data_loader_takes_it() -> None:
    data = TensorDataset(torch.arange(len(LENGTHS)))
    sampler = BucketSampler(LENGTHS, 5, seed=1)
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    assert torch.cat([batch for (batch,) in loader]).tolist() == list(sampler)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size, microbatches and pool are 0, 1 and 50"):
        BucketSampler(LENGTHS, 0)
