"""A start that would begin before the newest copy waits for the hosts that hold it: they may only
be late.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported by a star import

from benchmarks.netns import Host
from planner.executor.checkpoint.folders import INDEX
from planner.executor.checkpoint.host_memory import HostMemory, Start
from planner.executor.checkpoint.known_copies import (
    HostCopies,
    KnownCopies,
    NewerCopy,
    minibatch_of,
)
from planner.selfcheck.listening import listening_sockets
from tests.campaigns.elastic.faults import EVERY, Cluster, write_plan

STEPS = 5000  # more than are trained
WITHIN_S = 300.0  # for one step, on a machine that is also otherwise busy


def memory_with(folder: Path, *copies: str) -> HostMemory:
    for copy in copies:
        (folder / copy).mkdir(parents=True)
        (folder / copy / INDEX).touch()
    return HostMemory(folder)


def test_what_hosts_told_is_known_when_they_are_gone(tmp_path: Path) -> None:
    store = HashStore()
    first = memory_with(tmp_path / "a", "step-00000030-0000", "step-00000020-0000")
    second = memory_with(tmp_path / "b", "step-00000030-0000")
    for memory in (first, second):
        KnownCopies(store).tell(memory)
    known, name = KnownCopies(store), os.uname().nodename
    assert known.newer_than(29, {first.place}) == NewerCopy("step-00000030-0000", (name,))
    both = NewerCopy("step-00000030-0000", (name, name), ("step-00000020-0000",))
    assert known.newer_than(19, ()) == both
    assert known.newer_than(30, ()) is None
    assert known.newer_than(0, {first.place, second.place}) is None

    known.give_up(NewerCopy("step-00000030-0000", (name,)))
    assert KnownCopies(store).newer_than(0, {second.place}) == NewerCopy(
        "step-00000020-0000", (name,)
    )
    known.give_up(both)
    assert known.newer_than(0, ()) is None
    # A newer one, until the memory in its place is empty.
    memory_with(tmp_path / "a", "step-00000040-0001")
    known.tell(first)
    assert known.newer_than(0, ()) == NewerCopy("step-00000040-0001", (name,))
    first.keep([])
    known.tell(first)
    assert known.newer_than(0, ()) is None
    assert [known.count_start() for _ in range(2)] == [0, 1]


def test_a_new_store_learns_of_absent_hosts_from_those_that_are_there(tmp_path: Path) -> None:
    known = KnownCopies(HashStore())
    here = memory_with(tmp_path / "a", "step-00000030-0002")
    last = Start(
        hosts={"1": "here", "2": "b", "3": "c"},
        places={"1": here.place, "2": "/b", "3": "/c"},
        first=20,
    )
    known.tell(memory_with(tmp_path / "c"))
    known.tell(here)
    known.tell_of_others(here, last)
    assert known.newer_than(0, {here.place}) == NewerCopy("step-00000030-0002", ("b", "c"))
    # What a host tells of itself counts more.
    known = KnownCopies(HashStore())
    known._store.set(
        "copies at /b", HostCopies(identity="4", name="b", copies=()).model_dump_json()
    )
    known.tell_of_others(here, last)
    assert known.newer_than(0, {here.place}) == NewerCopy("step-00000030-0002", ("c",))


def test_names_of_copies_have_the_minibatch() -> None:
    assert minibatch_of("step-00000040-0003") == 40
    assert minibatch_of("step-123456789-0003") == 123456789


class _Here(Host):
    """This machine, in place of a network namespace."""

    def popen(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(arguments, text=True, **options)


@contextmanager
def hosts_here(count: int, folder: Path, *more: str) -> Iterator[Cluster]:
    """Yield agents on this machine that have begun to train, each with a memory of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    cluster = Cluster([_Here("", "127.0.0.1")] * count, folder, STEPS, more, port)
    try:
        cluster.start(0)
        # All have one address here, so whoever came first would open the store where they meet.
        await_that(lambda: port in {each.port for each in listening_sockets()}, cluster)
        for host in range(1, count):
            cluster.start(host)
        yield cluster
    finally:
        for host, process in cluster.processes.items():
            pause(cluster, host, signal.SIGKILL)
            process.wait()
            HostMemory(cluster.memory(host)).remove()


def pause(cluster: Cluster, host: int, sent: signal.Signals = signal.SIGSTOP) -> None:
    for pid in (cluster.processes[host].pid, *cluster.workers(host).values()):
        with suppress(ProcessLookupError):
            os.kill(pid, sent)


def await_that(condition: Callable[[], bool], cluster: Cluster) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        words = "\n".join(
            (cluster.folder / f"err-{host}").read_text("utf-8") for host in cluster.processes
        )
        assert time.monotonic() < deadline, words
        assert not cluster.ended, words
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hosts_that_pause_while_the_run_recovers_are_waited_for(tmp_path: Path) -> None:
    """Two quick faults: a worker is killed, and in the start after it two of three hosts do not
    answer for a while.

    The third one began alone, with minibatch 0, before the others came back with the newest copy.
    """
    write_plan(3, 1, tmp_path)
    with hosts_here(3, tmp_path, "--copy-every", str(EVERY)) as cluster:

        def is_copied() -> bool:
            updates = cluster.updates()
            together = bool(updates) and updates[-1].workers == 3
            return together and updates[-1].minibatch > 3 * EVERY and cluster.all_is_copied()

        await_that(is_copied, cluster)
        await_that(lambda: all(0 in cluster.workers(host) for host in (0, 1)), cluster)
        before = cluster.workers(0)[0]
        at_s = time.time()
        os.kill(cluster.workers(1)[0], signal.SIGKILL)
        await_that(lambda: cluster.workers(0).get(0, before) != before, cluster)
        for host in (1, 2):
            pause(cluster, host)

        def begins_alone() -> bool:
            words = (tmp_path / "err-0").read_text("utf-8")
            return "it waits up to" in words or cluster.updates()[-1].workers == 1

        await_that(begins_alone, cluster)
        for host in (1, 2):
            pause(cluster, host, signal.SIGCONT)
        await_that(lambda: cluster.updates()[-1].began_s > at_s, cluster)
        updates = cluster.updates()

    newest = max(each.minibatch for each in updates if each.began_s < at_s)
    first = next(each for each in updates if each.began_s > at_s)
    assert newest - first.minibatch + 1 <= 2 * EVERY, first
    assert first.workers > 1  # two hosts have all of the copy, and the last one may be later still
