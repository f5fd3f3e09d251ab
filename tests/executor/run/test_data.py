"""Training data is a function of the minibatch's number, the same on every worker."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from planner.errors import InputError, ModelFileError
from planner.executor.run.data import (
    RANDOM_BATCHES,
    DatasetBatches,
    FedBatches,
    OfRank,
    RandomBatches,
    make_batches,
)
from planner.model.batch import Batch, make_batch
from planner.model.spec import load_model_file
from planner.options.training import STEPS
from planner.schedule.instructions import Unit
from tests.executor.models import write_model


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is (i, -i)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), torch.tensor(-index)


def samples(batch: Batch) -> list[int]:
    assert torch.equal(batch.args[0], -batch.target)
    return [int(sample) for sample in batch.args[0]]


def test_an_epoch_visits_each_sample_at_most_once_and_the_next_in_another_order() -> None:
    data = DatasetBatches(Numbers(23), microbatch_size=5, microbatches=1, seed=1, drop_last=True)
    assert data.minibatches_per_epoch == 4, "the last three samples make no minibatch"
    epochs = [
        [n for m in range(4) for n in samples(data.batch(Unit(4 * epoch + m)))]
        for epoch in range(2)
    ]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_workers_that_ask_for_other_minibatches_agree() -> None:
    one = DatasetBatches(Numbers(40), 4, 1, seed=7)
    other = DatasetBatches(Numbers(40), 4, 1, seed=7)
    in_order = {m: samples(one.batch(Unit(m))) for m in range(25)}
    assert all(samples(other.batch(Unit(m))) == in_order[m] for m in (24, 3, 11, 0))
    assert samples(DatasetBatches(Numbers(40), 4, 1, seed=8).batch(Unit(0))) != in_order[0]


def test_microbatches_divide_the_minibatch_that_one_worker_would_see() -> None:
    whole = DatasetBatches(Numbers(64), 12, 1, seed=0)
    parts = DatasetBatches(Numbers(64), 4, 3, seed=0)
    for minibatch in range(5):
        pieces = [samples(parts.batch(Unit(minibatch, microbatch))) for microbatch in range(3)]
        assert list(chain.from_iterable(pieces)) == samples(whole.batch(Unit(minibatch)))


def test_ranks_divide_the_microbatches_of_their_group() -> None:
    group = DatasetBatches(Numbers(40), 6, 2, seed=0, drop_last=True)
    ranks = [
        OfRank(DatasetBatches(Numbers(40), 2, 6, seed=0, drop_last=True), place, 3)
        for place in range(3)
    ]
    for unit in (Unit(minibatch, microbatch) for minibatch in range(5) for microbatch in range(2)):
        assert list(chain.from_iterable(samples(rank.batch(unit)) for rank in ranks)) == samples(
            group.batch(unit)
        )
        assert [rank.size(unit) for rank in ranks] == [2, 2, 2]
        assert sum(rank.share(unit) for rank in ranks) == pytest.approx(group.share(unit))
        assert [rank.numbered(unit).microbatch for rank in ranks] == [
            3 * unit.microbatch + place for place in range(3)
        ]
    assert {rank.microbatches for rank in ranks} == {2}
    assert {rank.minibatch_size(0) for rank in ranks} == {12}


def test_a_minibatch_with_too_few_samples_for_the_ranks_is_refused() -> None:
    with pytest.raises(
        InputError, match="a minibatch has 4 samples, and ranks that shard experts take 6 or more"
    ):
        OfRank(DatasetBatches(Numbers(40), 2, 6, seed=0), 0, 3)
    fed = FedBatches(6, kept=2)
    rank = OfRank(fed, 0, 3)
    for count, refused in ((12, False), (5, True)):
        number = fed.count
        fed.feed(make_batch((torch.arange(count),) * 2, "a batch"))
        if refused:
            with pytest.raises(InputError, match="a minibatch has 5 samples"):
                rank.size(Unit(number, 0))
        else:
            assert rank.size(Unit(number, 0)) == 2


def test_a_dataset_smaller_than_a_minibatch_is_refused() -> None:
    with pytest.raises(
        ModelFileError, match=r"dataset\(\) has 3 samples, fewer than one minibatch of 8"
    ):
        DatasetBatches(Numbers(3), 4, 2, seed=0, drop_last=True)


def test_lengths_of_runs(tmp_path: Path) -> None:
    data = DatasetBatches(Numbers(23), 5, 1, seed=1)
    assert [data.minibatches(7, None), data.minibatches(None, 3), data.minibatches(None, None)] == [
        7,
        15,
        5,
    ]
    random = make_batches(load_model_file(write_model(tmp_path, "convolutional", "sgd")), 4, 1, 0)
    assert isinstance(random, RandomBatches)
    assert random.minibatches(None, None) == STEPS


def test_random_batches_repeat_after_a_while_and_leave_the_generator_alone(tmp_path: Path) -> None:
    data = make_batches(load_model_file(write_model(tmp_path, "convolutional", "sgd")), 4, 1, 0)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = [data.batch(Unit(m)).args[0] for m in range(RANDOM_BATCHES)]
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(data.batch(Unit(RANDOM_BATCHES)).args[0], first[0])
    assert not torch.equal(first[0], first[1])
