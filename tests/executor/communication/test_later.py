"""Values that the host looks at later: in order, without waiting, and never more than a bounded
number behind.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from planner.executor.communication.later import MOST, Later
from tests.runtimes import PretendedDevice, registered

GPU = torch.device("cuda")


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    """A GPU whose copies end when the test says so."""
    pretended = PretendedDevice()
    with registered("cuda", pretended):
        yield pretended


def test_on_a_cpu_the_reader_has_its_turn_at_once() -> None:
    seen: list[float] = []
    Later(torch.device("cpu")).read(torch.tensor(2.5), lambda value: seen.append(float(value)))
    assert seen == [2.5]


def test_values_come_in_order_when_their_copies_have_ended(device: PretendedDevice) -> None:
    later = Later(GPU)
    seen: list[int] = []
    value = torch.zeros((), dtype=torch.int64)
    for number in range(5):
        device.launched_s += 1
        value.fill_(number)  # overwritten each time: what was to be read is a copy
        later.read(value, lambda read: seen.append(int(read)))
    assert seen == []
    device.reached_s = 3.0
    later.poll()
    assert seen == [0, 1, 2]
    later.flush()
    assert seen == [0, 1, 2, 3, 4]


def test_the_host_waits_only_for_the_oldest_and_only_when_many_are_on_their_way(
    device: PretendedDevice,
) -> None:
    later = Later(GPU)
    seen: list[int] = []
    for number in range(MOST + 1):
        assert (seen, device.waits) == ([], 0)
        device.launched_s += 1
        later.read(torch.tensor(number), lambda read: seen.append(int(read)))
    assert (seen, device.waits) == ([0], 1)


def test_memory_of_copies_is_used_again(device: PretendedDevice) -> None:
    later = Later(GPU)
    places: set[int] = set()
    for number in range(10):
        device.reached_s = device.launched_s = number + 1.0
        later.read(torch.tensor(float(number)), lambda read: places.add(read.data_ptr()))
    assert len(places) == 1
