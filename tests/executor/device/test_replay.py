"""The product's own workers under NCCL's rules: none waits for ever, and faults put back in are
found.

Each worker's host operations are written down while the product makes them, and then played
together under the rules of `rules`. Waits for the whole device are put wherever something is
allocated or launched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from planner.errors import WorkerError
from planner.executor.communication.nccl_links import NCCLLinks
from tests.executor.device import mutations
from tests.executor.device.cases import lean_runs, runs
from tests.executor.device.findings import takes_late
from tests.executor.device.other_runs import record_links, record_own_loop
from tests.executor.device.rules import (
    DeviceWait,
    NCCLDeadlock,
    Operation,
    Post,
    Recording,
    StreamWait,
    Work,
    check,
)
from tests.executor.device.runs import Run, record
from tests.executor.device.simulated import RaceError

recorded = cache(record)
ALL = runs()
SOME = ALL[::26]  # of every kind; the slow tests take all
EVERY = [SOME, pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
LEANEST = [lean_runs()[::10], pytest.param(lean_runs(), marks=[pytest.mark.slow])]
IDS = ["some", "all"]


def deadlocks(recording: Recording, **how: Any) -> bool:
    """Whether the workers wait for ever."""
    try:
        check(recording, **how)
    except NCCLDeadlock:
        return True
    return False


@pytest.mark.parametrize("shapes", EVERY, ids=IDS)
def test_no_wait_for_a_device_closes_a_circle(shapes: list[Run]) -> None:
    """Neither on one worker nor on all at once, at no place: the conditions of all waits together
    close no circle.
    """
    assert not {str(run) for run in shapes if deadlocks(recorded(run), waiting=range(run.workers))}
    assert len(shapes) >= 15


@pytest.mark.parametrize("shapes", EVERY, ids=IDS)
def test_sends_may_wait_for_their_receives(shapes: list[Run]) -> None:
    assert not {str(run) for run in shapes if deadlocks(recorded(run), rendezvous=True)}


@pytest.mark.parametrize("shapes", LEANEST, ids=IDS)
def test_schedules_of_less_memory_wait_for_nobody_either(shapes: list[Run]) -> None:
    """v-half and v-min: with waits for all devices, and with sends that wait for their receives."""
    assert not {str(run) for run in shapes if deadlocks(recorded(run), waiting=range(run.workers))}
    assert not {str(run) for run in shapes if deadlocks(recorded(run), rendezvous=True)}
    assert not {str(run) for run in shapes if takes_late(recorded(run))}


@pytest.mark.parametrize("every", [6, pytest.param(2, marks=pytest.mark.slow)], ids=IDS)
def test_what_is_under_way_at_an_evaluation_holds_up_nobody(every: int) -> None:
    """Sends wait for their receives, and any one worker for its device."""
    paused = [run for run in ALL if run.evaluate_every and run.shape.asynchronous][::every]
    assert not {
        str(run) for run in paused if stuck_with_a_single_wait(recorded(run), rendezvous=True)
    }
    with patch.object(NCCLLinks, "expect", lambda *_: None):
        for run in (run for run in paused if not run.degrees):  # a group alone has no messages
            # Evaluation sends on the same lanes, so a receiver that has not posted what is under
            # way takes that.
            with pytest.raises(
                WorkerError, match=r"sent minibatch \d+, .* expected minibatch \d+,"
            ):
                record(run)


@pytest.mark.parametrize("shapes", EVERY, ids=IDS)
def test_nothing_waits_for_a_device_while_messages_are_under_way(shapes: list[Run]) -> None:
    """All memory is taken before the first message. So sends may wait for their receives, and
    devices where they do.
    """
    assert not {str(run) for run in shapes if takes_late(recorded(run))}
    assert not {str(run) for run in shapes if waits_where_memory_is_taken(recorded(run))}
    some = shapes[::5]
    assert found_with(mutations.memory_taken_when_needed, some, waits_where_memory_is_taken)
    with mutations.memory_taken_when_needed():
        # a stage alone has no messages
        assert all(takes_late(record(run)) for run in some if len(run.ranks) > 1)


@pytest.mark.slow
def test_where_one_worker_waits_for_its_device_and_sends_for_their_receives() -> None:
    """The table in docs/explanation/executor.md; the four are of a value that skips chunks."""
    one = {str(run) for run in ALL if stuck_with_a_single_wait(recorded(run), rendezvous=True)}
    all_ = {
        str(run)
        for run in ALL
        if deadlocks(recorded(run), waiting=range(run.workers), rendezvous=True)
    }
    assert (len(ALL), len(one), len(all_)) == (366, 4, 103)
    assert all("interleaved" in name and "skips" in name for name in one)


@pytest.mark.parametrize("shapes", EVERY, ids=IDS)
def test_straight_pipelines_bear_waits_of_devices_and_of_sends_together(shapes: list[Run]) -> None:
    """Runs of messages of two neighbours fit together: one sends and takes what the other takes and
    sends.
    """
    for run in shapes:
        straight = set(run.replicas) == {1} and not (run.skips or run.tied or run.evaluate_every)
        if straight and run.schedule in ("1f1b", "1f1b-flush", "2bw", "gpipe", "zb-h1"):
            check(recorded(run), waiting=range(run.workers), rendezvous=True)


def test_with_one_hardware_queue_sends_that_wait_block_the_receives_behind_them() -> None:
    """Why CUDA_DEVICE_MAX_CONNECTIONS is set: otherwise a stream waits for another that shares its
    queue.
    """
    found = {str(run) for run in SOME if deadlocks(recorded(run), rendezvous=True, one_queue=True)}
    assert 0 < len(found) < len(SOME), found


@pytest.mark.parametrize(
    ("hosts", "workers"),
    [
        (2, 1),
        *(
            pytest.param(*counts, marks=pytest.mark.slow)
            for counts in ((1, 2), (1, 4), (2, 2), (3, 2))
        ),
    ],
)
def test_links_are_measured_by_ends_that_never_wait_for_each_other(
    hosts: int, workers: int
) -> None:
    recording = record_links(hosts, workers)
    check(recording, waiting=recording)
    check(recording, rendezvous=True)
    with mutations.no_first_uses(), pytest.raises((NCCLDeadlock, RaceError)):
        record_links(hosts, workers)


@pytest.mark.parametrize("shapes", EVERY, ids=IDS)
def test_a_loop_of_the_users_own_needs_no_look_ahead(shapes: list[Run]) -> None:
    for run in shapes:
        if run.replicas in ((1, 1), (2, 1)) and not run.evaluate_every:
            recording = record_own_loop(run)
            check(recording, waiting=recording)
            check(recording, rendezvous=True)


Stuck = Callable[[Recording], bool]


def found_with(
    fault: Callable[[], AbstractContextManager[None]], chosen: list[Run], stuck: Stuck = deadlocks
) -> int:
    """In how many of `chosen` the workers wait for ever with the fault, where they do not without
    it.
    """
    assert not any(stuck(recorded(run)) for run in chosen)
    with fault():
        return sum(stuck(record(run)) for run in chosen)


def stopped_with(fault: Callable[[], AbstractContextManager[None]], chosen: list[Run]) -> int:
    """In how many of `chosen` the workers come to no end with the fault, where they do
    without it.
    """
    assert not any(deadlocks(recorded(run)) for run in chosen)
    with fault():
        return sum(_is_stopped(run) for run in chosen)


def _is_stopped(run: Run) -> bool:
    try:
        record(run)
    # all wait, or a communicator is made while another is at work
    except (NCCLDeadlock, RaceError):
        return True
    return False


def stuck_with_a_single_wait(recording: Recording, **how: Any) -> bool:
    return any(deadlocks(recording, waiting=(rank,), **how) for rank in recording)


def waits_where_memory_is_taken(recording: Recording) -> bool:
    return deadlocks(recording, waiting=recording, rendezvous=True, taking=True)


def stuck_with_waits_everywhere(recording: Recording) -> bool:
    return deadlocks(recording, waiting=recording)


# A worker that has no more minibatches than receives posted ahead is never ahead of anybody: no
# replicas here.
SINGLE = [run for run in ALL if set(run.replicas) == {1} and not run.degrees]
PLAIN = [run for run in SINGLE if not run.evaluate_every][::5]
TRACED = [run for run in ALL if run.traced]
# Under zb-v the first and the last stage are on one worker.
TIED = [
    run for run in ALL if any(len({run.shape.ranks[s] for s in pair}) > 1 for pair in run.tied[:1])
]


def some_and_all(shapes: list[Run], every: int) -> pytest.MarkDecorator:
    """Let a test have every so many of the shapes, and as a slow one all."""
    cases = [shapes[::every], pytest.param(shapes, marks=pytest.mark.slow)]
    return pytest.mark.parametrize("shapes", cases, ids=IDS)


@some_and_all(PLAIN, 3)
def test_posting_ahead_is_found_by_waits_on_one_worker(shapes: list[Run]) -> None:
    assert found_with(mutations.posting_ahead, shapes, stuck_with_a_single_wait) == len(shapes)


@some_and_all(PLAIN, 3)
def test_first_uses_in_another_order_are_found(shapes: list[Run]) -> None:
    assert stopped_with(mutations.first_uses_in_another_order, shapes) == len(shapes)


@some_and_all([run for run in TIED if not run.evaluate_every][::2], 3)
def test_tied_weights_whose_communicators_are_not_made_before_are_found(shapes: list[Run]) -> None:
    assert stopped_with(mutations.no_first_uses, shapes) == len(shapes) > 3


@some_and_all(TRACED, 4)
def test_a_trace_that_waits_for_the_device_is_found_together_with_posting_ahead(
    shapes: list[Run],
) -> None:
    """It waits after every instruction, so on all workers."""
    assert found_with(mutations.posting_ahead, shapes, stuck_with_waits_everywhere) == len(shapes)


def test_the_rules_know_a_circle_when_they_see_one() -> None:
    """Two workers that wait for their devices between a send and the receive that follows."""

    def worker(sends: str, receives: str) -> list[Operation]:
        first = [
            Post(name, 0, kind, 0)  # type: ignore[arg-type]
            for name, kind in sorted([(sends, "send"), (receives, "receive")])
        ]
        receive = Post(receives, 1, "receive", 0)
        return [
            *first,
            Post(sends, 1, "send", 0),
            Work(),
            receive,
            StreamWait(receive),
            DeviceWait(),
        ]

    recording = {0: worker("there", "back"), 1: worker("back", "there")}
    check(recording)
    check(recording, waiting=(0, 1))
    check(recording, waiting=(0,), rendezvous=True)
    with pytest.raises(NCCLDeadlock, match="back"):
        check(recording, waiting=(0, 1), rendezvous=True)
    with pytest.raises(NCCLDeadlock, match="no counterpart"):
        check({0: recording[0], 1: recording[1][:4]}, rendezvous=True)
