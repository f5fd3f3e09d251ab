"""Captures while the supervisor does all that it ever does, every 10 ms: none may fail, or give
another graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner.model.capture.capture import capture
from planner.options.training import RunOptions
from planner.workers import supervisor as supervising
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.supervisor import Supervisor
from planner.workers.watch import Page, own_keys
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.model.architectures import ARCHITECTURES

TIMEOUT_S = 3600.0  # of the watch, which must not end this process
INTERVAL_S = 0.01
# Models with constants of their own, which the tracer lifts out of the graph, fail first.
FEW = ("lstm", "mixed", "gnmt")
FIVE = (*FEW, "gpt2", "towers")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """A supervisor of this process at work, whose pages are written to the store; each with its
    place in the code.
    """
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(supervising, "_OVERDUE_SHARE", 0.0)
    path = write_model(tmp_path, "blocks", "sgd")
    job = Job(
        model=str(path),
        plan=make_plan(structural_profile(path, 4), (1,)),
        run_options=RunOptions(hang_timeout_s=TIMEOUT_S),
    )
    heartbeat = Heartbeat()
    heartbeat.enter("building its model")
    supervisor = Supervisor(job, heartbeat)
    supervisor._interval_s = INTERVAL_S
    supervisor.watch(lambda error: pytest.fail(str(error)))
    yield store
    supervisor.stop()


def digest(name: str, *, training: bool) -> str:
    """Capture one of the models; return what its graph is told apart by."""
    case = ARCHITECTURES[name]
    torch.manual_seed(0)
    return capture(case.build().train(training), case.batch(4), case.loss).hash


def assert_watched(names: Sequence[str], rounds: int, store: TCPStore) -> None:
    """Capture each model for training and for evaluation, again and again; all graphs of a model
    are the same.
    """
    cases = [(name, training) for name in names for training in (True, False)]
    graphs = {case: set[str]() for case in cases}
    for _ in range(rounds):
        for name, training in cases:
            graphs[name, training].add(digest(name, training=training))
    page = Page.model_validate_json(own_keys(store).get("page/0"))
    assert page.place is not None, "the watch has read where the capture is"
    assert page.sequence > 10 * len(cases) * rounds, "again and again"
    assert {case: len(seen) for case, seen in graphs.items()} == dict.fromkeys(cases, 1)


def test_captures_do_not_notice_that_they_are_watched(store: TCPStore) -> None:
    assert_watched(FEW, 1, store)


@pytest.mark.slow
def test_fifty_captures_do_not_notice_that_they_are_watched(store: TCPStore) -> None:
    assert_watched(FIVE, 5, store)
