"""The link between two real processes."""

from __future__ import annotations

import time

import pytest

from planner.errors import WorkerError
from planner.profiler.links.measure_link import measure_link


def test_measure_loopback() -> None:
    speed = measure_link(message_bytes=1_000_000)
    assert 1e5 < speed.bandwidth_bytes_per_s < 1e12
    assert 1e5 < speed.all_reduce_bandwidth_bytes_per_s < 1e12
    assert 0 < speed.latency_s < 1


def test_an_interface_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(WorkerError, match="nothing0"):
        measure_link(interface="nothing0")


def test_it_ends_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"within 0\.5 s"):
        measure_link(timeout_s=0.5)
    assert time.monotonic() - start < 60
