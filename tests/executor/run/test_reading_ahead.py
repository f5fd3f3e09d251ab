"""Batches read ahead in a thread are those that the training thread would have read, and so are the
errors.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from planner.executor.run.data import DatasetBatches
from planner.executor.run.reading_ahead import TRIALS, ReadAhead
from planner.schedule.instructions import Unit

UNITS = [Unit(minibatch, microbatch) for minibatch in range(6) for microbatch in range(2)]


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is i, after `look` has been called with it; notes which threads read it."""

    def __init__(self, look: Callable[[int], object] = lambda _: None) -> None:
        self.look = look
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.threads.append(threading.current_thread())
        found = self.look(index)
        return torch.tensor(float(index)), torch.as_tensor(index if found is None else found)


def _read(dataset: Samples, worth_s: float) -> list[list[float]]:
    """Read all units, while the training thread draws random numbers, too."""
    data = ReadAhead(DatasetBatches(dataset, 2, 2, seed=1), worth_s=worth_s)
    found = []
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with data.reading(UNITS):
        for unit in UNITS:
            batch = data.batch(unit)
            found.append(
                [
                    *batch.args[0].tolist(),
                    *batch.target.tolist(),
                    torch.rand(()).item(),
                    random.random(),
                    np.random.rand(),
                ]
            )
    assert not data._thread
    assert threading.active_count() == before
    return found


before = 0


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> None:
    global before
    before = threading.active_count()


def _own_generator() -> Callable[[int], object]:
    return lambda index: torch.rand((), generator=torch.Generator().manual_seed(index))


def _late_draw(draw: Callable[[], object]) -> Callable[[int], object]:
    """Draw for one sample only, which the training thread has not seen when it starts the
    thread.
    """
    late = DatasetBatches(Samples(), 2, 2, seed=1).batch(UNITS[TRIALS + 3]).args[0].tolist()
    return lambda index: draw() if index in late else 0.0


def _forked(_index: int) -> Tensor:
    """Draw, and put the generator back, so that its state does not tell."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand(())


def _connection() -> Callable[[int], object]:
    """Only the thread that made this may use it."""
    made: list[sqlite3.Connection] = []

    def look(index: int) -> float:
        if not made:
            made.append(sqlite3.connect(":memory:"))
        return float(made[0].execute("select ?", (index,)).fetchone()[0])

    return look


@pytest.mark.parametrize(
    ("make_look", "by_thread"),
    [
        (lambda: lambda _: None, True),
        (_own_generator, True),
        (lambda: lambda _: torch.rand(()), False),
        (lambda: lambda _: random.random(), False),
        (lambda: lambda _: np.random.rand(), False),
        (lambda: _forked, False),
        (lambda: _late_draw(lambda: torch.rand(())), True),
        (_connection, False),
    ],
    ids=[
        "plain",
        "own generator",
        "torch",
        "python",
        "numpy",
        "forked",
        "late draw",
        "connection",
    ],
)
def test_equal_to_reading_in_the_training_thread(
    make_look: Callable[[], Callable[[int], object]], by_thread: bool
) -> None:
    plain, ahead = Samples(make_look()), Samples(make_look())
    assert _read(plain, float("inf")) == _read(ahead, 0.0)
    main = threading.current_thread()
    assert set(plain.threads) == {main}
    others = [thread for thread in ahead.threads if thread is not main]
    # What fails in the thread is read again: it has shown by its first sample that it cannot be
    # read there.
    assert (len(others) > 1) == by_thread


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_what_is_drawn_late_is_drawn_by_its_seed(draw: Callable[[], object]) -> None:
    """Python and NumPy draw before the thread notices, so the draws of the training thread itself
    may be others.
    """
    plain, ahead = Samples(_late_draw(draw)), Samples(_late_draw(draw))
    expected, found = (
        [numbers[:4] for numbers in _read(dataset, worth_s)]
        for dataset, worth_s in ((plain, float("inf")), (ahead, 0))
    )
    assert found == expected
    assert {thread.name for thread in ahead.threads} == {
        "prefetching",
        threading.current_thread().name,
    }


def test_what_is_read_quickly_is_read_without_a_thread() -> None:
    dataset = Samples()
    _read(dataset, 10.0)
    assert set(dataset.threads) == {threading.current_thread()}


def test_errors_come_from_the_training_thread() -> None:
    """At the batch that they belong to, with the place in the user's code."""
    broken = DatasetBatches(Samples(), 2, 2, seed=1).batch(UNITS[7]).args[0].tolist()

    def look(index: int) -> None:
        if index in broken:
            raise ValueError(f"sample {index} is broken")

    data = ReadAhead(DatasetBatches(Samples(look), 2, 2, seed=1), worth_s=0.0)
    done = []

    def run() -> None:
        with data.reading(UNITS):
            for unit in UNITS:
                data.batch(unit)
                done.append(unit)

    with pytest.raises(ValueError, match="is broken") as caught:
        run()
    assert done == UNITS[:7]
    assert any(entry.name == "look" for entry in caught.traceback)
    assert threading.active_count() == before


def test_an_error_elsewhere_ends_the_thread() -> None:
    data = ReadAhead(DatasetBatches(Samples(), 2, 2, seed=1), worth_s=0.0)

    def run() -> None:
        with data.reading(UNITS):
            for unit in UNITS[: TRIALS + 1]:
                data.batch(unit)
            assert data._thread
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        run()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_units_in_another_order_are_read_as_they_are_asked_for() -> None:
    data, plain = (DatasetBatches(Samples(), 2, 2, seed=1) for _ in range(2))
    ahead = ReadAhead(data, worth_s=0.0)
    order = [*UNITS[:5], UNITS[9], UNITS[5], UNITS[6]]
    with ahead.reading(UNITS):
        for unit in order:
            assert torch.equal(ahead.batch(unit).args[0], plain.batch(unit).args[0])
        assert not ahead._thread
