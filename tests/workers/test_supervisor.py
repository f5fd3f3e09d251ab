"""Watching through the store: how much of it each worker asks for, and that one judge is enough."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, cast

import pytest

# PyTorch exports both by a star import.
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from planner.errors import PlannerError
from planner.formats.plan import Plan
from planner.options.training import RunOptions
from planner.schedule.instructions import Forward, ReceiveActivation, Unit
from planner.workers import watch
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.supervisor import Supervisor
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

TIMEOUT_S = 60.0


class Counted(PrefixStore):
    """Counts the keys that are read and written."""

    keys: ClassVar[Counter[str]] = Counter()

    def set(self, key: str, value: str) -> None:
        self.keys["set " + key.partition("/")[0]] += 1
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self.keys["read"] += 1
        return super().get(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.keys["read"] += 1
        return super().compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        self.keys["read"] += len(keys)
        return super().check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.keys["read"] += len(keys)
        return super().multi_get(keys)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store that torchrun would hold."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
    )
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Plan]:
    """Plans of one stage, by its replicas."""
    path = write_model(tmp_path_factory.mktemp("model"), "blocks", "sgd")
    profile = structural_profile(path, 4)
    return {workers: make_plan(profile, (workers,)) for workers in (4, 16)}


class Watched:
    """Workers that are threads of this process: each beats, and is watched."""

    def __init__(
        self,
        plan: Plan,
        timeout_s: float,
        monkeypatch: pytest.MonkeyPatch,
        interval_s: float | None = None,
    ) -> None:
        job = Job(model=plan.model, plan=plan, run_options=RunOptions(hang_timeout_s=timeout_s))
        self.heartbeats = [Heartbeat() for _ in range(plan.workers)]
        self.told: dict[int, str | None] = {}
        self._stop = threading.Event()
        self.moving = set(range(plan.workers))
        self.watches = []
        for rank, heartbeat in enumerate(self.heartbeats):
            monkeypatch.setenv("RANK", str(rank))
            heartbeat.enter("starting")
            self.watches.append(Supervisor(job, heartbeat))
            if interval_s is not None:
                self.watches[-1]._interval_s = interval_s
            self.watches[-1].watch(self._ending(rank))
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _ending(self, rank: int) -> watch.Ending:
        def end(error: PlannerError | None) -> None:  # the thread alone, which returns from here
            self.told[rank] = None if error is None else error.message

        return cast("watch.Ending", end)

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(0.05):
            number += 1
            for rank in self.moving:
                self.heartbeats[rank].begin(Forward(0, Unit(number)))

    def close(self) -> None:
        self._stop.set()
        for each in self.watches:
            each.stop()
        self._thread.join()


def await_told(watched: Watched, ranks: Sequence[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not watched.told.keys() >= set(ranks):
        assert time.monotonic() < deadline, watched.told
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [4, 16])
def test_what_the_store_answers_grows_with_the_workers_and_not_with_their_square(
    workers: int, plans: dict[int, Plan], store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "Part", Counted)
    Counted.keys.clear()
    # A slow machine takes longer than a short time-out for 16 workers in one process, and then none
    # goes on.
    watched = Watched(plans[workers], 4 * TIMEOUT_S, monkeypatch, interval_s=0.2)
    try:
        deadline = time.monotonic() + 4 * TIMEOUT_S
        while Counted.keys["set page"] < 6 * workers:
            assert time.monotonic() < deadline, (watched.told, Counted.keys)
            time.sleep(0.05)
    finally:
        watched.close()
    assert watched.told == {}
    assert Counted.keys["read"] / Counted.keys["set page"] < 6


def test_a_worker_that_stands_still_is_the_cause_for_all(
    plans: dict[int, Plan], store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(plans[4], 2.0, monkeypatch)
    try:
        watched.moving = {0, 1, 3}
        watched.heartbeats[2].begin(Forward(0, Unit(17)))
        await_told(watched, range(4))
    finally:
        watched.close()
    (message,) = (text for text in watched.told.values() if text is not None)  # once for the host
    assert message.startswith("worker 2 (stage 0): has not moved for ")


def test_the_last_worker_judges_worker_0_which_does_not_respond(
    plans: dict[int, Plan], store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(plans[4], 2.0, monkeypatch)
    try:
        time.sleep(1.0)
        watched.moving = set()
        for rank in range(1, 4):  # they wait for it
            watched.heartbeats[rank].begin(ReceiveActivation(0, Unit(17), 0, 0))
        watched.watches[0].stop()  # neither writes its page nor judges
        await_told(watched, range(1, 4))
    finally:
        watched.close()
    (message,) = (text for text in watched.told.values() if text is not None)
    assert message.startswith("worker 0 (stage 0): has not moved for ")
    assert "does not respond" in message


def test_a_judge_that_has_ended_stays_until_all_others_have(
    plans: dict[int, Plan], store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(plans[4], 2.0, monkeypatch)
    first, *others = watched.watches
    judge = threading.Thread(target=first.await_others, daemon=True)
    try:
        watched.moving = {1, 2, 3}
        judge.start()
        time.sleep(4.0)  # twice as long as a worker may stand still that has not ended
        assert watched.told == {}
        assert judge.is_alive()

        for other in others:
            threading.Thread(target=other.await_others, daemon=True).start()
        judge.join(TIMEOUT_S)
        assert not judge.is_alive()
    finally:
        watched.close()
    assert watched.told == {}


def test_a_worker_that_does_not_end_is_named_once_all_others_have(
    plans: dict[int, Plan], store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(plans[4], 2.0, monkeypatch)
    try:
        time.sleep(1.0)
        watched.watches[2].stop()  # it writes no page
        watched.moving = set()
        for rank in (0, 1, 3):
            each = watched.watches[rank]
            threading.Thread(target=each.await_others, daemon=True).start()
        await_told(watched, (0, 3))
    finally:
        watched.close()
    (message,) = (text for text in watched.told.values() if text is not None)
    assert message.startswith("worker 2 (stage 0): has not moved for ")
    assert "does not respond" in message
