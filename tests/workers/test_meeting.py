"""How workers meet."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner.errors import WorkerError
from planner.workers.meeting import exchange
from planner.workers.place import own_seat


def test_a_worker_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorkerError, match=r"^worker 1 did not come in time"):
        exchange(PrefixStore("start", store), own_seat())


def test_all_hear_what_each_says(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    mine = own_seat({"steps": "`steps=5`"})
    assert exchange(store, mine) == [mine]
    assert (mine.server, mine.gpus, mine.same) == (3, (), {"steps": "`steps=5`"})
