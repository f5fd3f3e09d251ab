"""The data-parallel baseline of plans that divide minibatches: the same minibatches, reduced once each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from planner.api.running import train
from planner.executor import data_parallel
from planner.executor.data_parallel import Rounds, train_data_parallel
from planner.executor.run.data import BatchSource, DatasetBatches
from planner.model.spec import load_model_file
from planner.schedule.instructions import Unit
from planner.workers.job import Job
from tests.executor import eager
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.run.test_data import Numbers


def _parts(work: Rounds, data: BatchSource, round_: int) -> list[list[tuple[Unit, Any, bool]]]:
    """Return, for every worker: unit, factor of its loss, whether its backward all-reduces."""
    return [[(p.unit, p.factor, p.last) for p in work.parts(data, round_, rank)] for rank in range(work.world)]


def test_workers_take_microbatches_in_turn_and_reduce_after_their_last() -> None:
    data = DatasetBatches(Numbers(22), microbatch_size=4, microbatches=3, seed=1)
    work = Rounds(planned=3, world=2)
    third = pytest.approx(2 / 3)
    assert _parts(work, data, 0) == [
        [(Unit(0, 0), third, False), (Unit(0, 2), third, True)],
        [(Unit(0, 1), third, True)],
    ]
    # The last minibatch has 10 samples: 4, 3 and 3.
    assert _parts(work, data, 1) == [
        [(Unit(1, 0), pytest.approx(0.8), False), (Unit(1, 2), pytest.approx(0.6), True)],
        [(Unit(1, 1), pytest.approx(0.6), True)],
    ]
    assert work.count(data, 5, None) == 5
    assert work.count(data, None, 2) == 4


def test_a_worker_without_samples_takes_part_and_counts_for_nothing() -> None:
    data = DatasetBatches(Numbers(9), microbatch_size=4, microbatches=2, seed=1)
    assert _parts(Rounds(planned=2, world=2), data, 1) == [[(Unit(1, 0), 2.0, True)], [(Unit(1, 0), 0.0, True)]]


def test_with_fewer_microbatches_than_workers_each_has_one() -> None:
    work = Rounds(planned=2, world=3)
    data = DatasetBatches(Numbers(48), microbatch_size=4, microbatches=work.per_minibatch, seed=1)
    assert _parts(work, data, 0) == [[(Unit(0, rank), 1.0, True)] for rank in range(3)]
    assert work.count(data, 6, None) == 4
    assert [work.planned_minibatches(round_) for round_ in range(4)] == [1, 2, 1, 2]


def test_undivided_minibatches_go_whole_to_a_worker() -> None:
    work = Rounds(planned=1, world=2)
    data = DatasetBatches(Numbers(20), microbatch_size=4, microbatches=work.per_minibatch, seed=1)
    assert _parts(work, data, 2) == [[(Unit(4), 1.0, True)], [(Unit(5), 1.0, True)]]
    assert work.count(data, None, 1) == 3


@pytest.mark.parametrize(
    ("schedule", "microbatches", "count"),
    [
        pytest.param("1f1b-flush", 5, 47, id="an uneven share, and a smaller last minibatch"),
        pytest.param("2bw", 2, 25, id="a last minibatch of one sample"),
    ],
)
def test_it_trains_like_one_process_with_the_plans_minibatches(
    schedule: str, microbatches: int, count: int, tmp_path: Path
) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=count)
    plan = make_plan(structural_profile(path, 4), (1, 1), schedule, microbatches)
    result = train(path, plan, epochs=2, seed=eager.SEED, baseline="data-parallel")
    spec = load_model_file(path)
    model = eager.build(spec)
    losses = eager.train(spec, model, eager.minibatches(spec, 4 * microbatches, 2))
    assert result.minibatch_size == 4 * microbatches
    assert result.minibatches == len(losses)
    assert result.samples == 2 * count
    # Each loss depends on the updates before it, so a wrong gradient shows.
    assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-5)


class Counting(DistributedDataParallel):
    """Counts the all-reduces of gradients, whose number does not change the gradients."""

    reducing = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        Counting.reducing += self.require_backward_grad_sync
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]  # PyTorch's


@pytest.mark.parametrize(("schedule", "microbatches"), [("gpipe", 4), ("1f1b", 1)])
def test_gradients_are_reduced_once_per_minibatch(
    schedule: str, microbatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path, "language", "momentum")
    plan = make_plan(structural_profile(path, 4), (1,), schedule, microbatches)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(data_parallel, "DistributedDataParallel", Counting)
    monkeypatch.setattr(Counting, "reducing", 0)
    result = train_data_parallel(Job(model=str(path), plan=plan, steps=3, baseline="data-parallel"))
    assert result is not None
    assert result.minibatches == Counting.reducing == 3
