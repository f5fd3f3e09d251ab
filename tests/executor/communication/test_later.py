"""Values that the host looks at later: in order, without waiting, and never more than a bounded number behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.executor.communication import later
from planner.executor.communication.later import MOST, Later


class PretendEvent:
    """An event of a device that has come as far as `reached`."""

    reached = 0
    recorded = 0
    waits = 0

    def record(self) -> None:
        PretendEvent.recorded += 1
        self.number = PretendEvent.recorded

    def query(self) -> bool:
        return self.number <= PretendEvent.reached

    def synchronize(self) -> None:
        if not self.query():
            PretendEvent.waits += 1
            PretendEvent.reached = self.number


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Later:
    """A `Later` of a GPU whose copies end when the test says so."""
    made: dict[str, Any] = {"reached": 0, "recorded": 0, "waits": 0}
    for name, value in made.items():
        monkeypatch.setattr(PretendEvent, name, value)
    monkeypatch.setattr(later, "_new_copy", lambda value: later._Copy(torch.empty_like(value), PretendEvent()))  # type: ignore[arg-type]
    return Later(torch.device("cuda"))


def test_on_a_cpu_the_reader_has_its_turn_at_once() -> None:
    seen: list[float] = []
    Later(torch.device("cpu")).read(torch.tensor(2.5), lambda value: seen.append(float(value)))
    assert seen == [2.5]


def test_values_come_in_order_when_their_copies_have_ended(pretended: Later) -> None:
    seen: list[int] = []
    value = torch.zeros((), dtype=torch.int64)
    for number in range(5):
        value.fill_(number)  # overwritten each time: what was to be read is a copy
        pretended.read(value, lambda read: seen.append(int(read)))
    assert seen == []
    PretendEvent.reached = 3
    pretended.poll()
    assert seen == [0, 1, 2]
    pretended.flush()
    assert seen == [0, 1, 2, 3, 4]


def test_the_host_waits_only_for_the_oldest_and_only_when_many_are_on_their_way(pretended: Later) -> None:
    seen: list[int] = []
    for number in range(MOST):
        pretended.read(torch.tensor(number), lambda read: seen.append(int(read)))
    assert (seen, PretendEvent.waits) == ([], 0)
    pretended.read(torch.tensor(MOST), lambda read: seen.append(int(read)))
    assert (seen, PretendEvent.waits) == ([0], 1)


def test_memory_of_copies_is_used_again(pretended: Later) -> None:
    places: set[int] = set()
    for number in range(10):
        PretendEvent.reached = number + 1
        pretended.read(torch.tensor(float(number)), lambda read: places.add(read.data_ptr()))
    assert len(places) == 1
