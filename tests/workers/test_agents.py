"""torchrun's agents, as elastic runs change them."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import (  # type: ignore[attr-defined]  # exported by a star import
    DistStoreError,
    HashStore,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from planner.workers.interfaces import LOOPBACK, address_of
from planner.workers.rendezvous import HOSTS, NO_SHARED_STORE, Agent, OneHost
from planner.workers.secret import SECRET_VARIABLE, new_secret
from planner.workers.store_server import is_free, open_store

ELSEWHERE = RendezvousStoreInfo("elsewhere", 1)


class Meeting(OneHost):
    """A meeting of two hosts, which one of them leaves the first time."""

    def __init__(self) -> None:
        super().__init__(open_store(address_of(LOOPBACK), 0), "run")
        self.calls = 0

    def next_rendezvous(self) -> RendezvousInfo:
        self.calls += 1
        if self.calls == 1:
            raise DistStoreError("wait timeout after 60000ms, keys: /MASTER_ADDR")
        return RendezvousInfo(HashStore(), 0, 2, ELSEWHERE)


def test_each_start_has_a_new_store_and_an_agent_that_was_lost_is_not_waited_for_again() -> None:
    """The agent that opens the store is lost after all have met: the others meet again, and do not
    end.
    """
    meeting = Meeting()
    agent = Agent(meeting, address_of(LOOPBACK))
    first = agent.next_rendezvous().bootstrap_store_info
    second = agent.next_rendezvous().bootstrap_store_info
    assert meeting.calls == 3
    assert first is not None
    assert second is not None
    assert first.master_addr == second.master_addr == address_of(LOOPBACK)
    assert first.master_port != second.master_port


class KnownMeetings(OneHost):
    """A meeting of hosts that were told before."""

    def __init__(self, *starts: RendezvousInfo) -> None:
        super().__init__(open_store(address_of(LOOPBACK), 0), "run")
        self.starts = list(starts)

    def next_rendezvous(self) -> RendezvousInfo:
        return self.starts.pop(0)


def test_an_agent_that_another_has_left_meets_it_again() -> None:
    """PyTorch tells the slower of two agents that it is alone, where the other has left for the
    next start before it counts.
    """
    starts = HashStore(), HashStore()
    host = Agent(
        KnownMeetings(*(RendezvousInfo(store, 0, 2, ELSEWHERE) for store in starts)),
        address_of(LOOPBACK),
    )
    places = [host.next_rendezvous().bootstrap_store_info for _ in starts]

    meetings = KnownMeetings(
        RendezvousInfo(starts[0], 1, 1, ELSEWHERE), RendezvousInfo(starts[1], 1, 2, ELSEWHERE)
    )
    met = Agent(meetings, None).next_rendezvous()
    assert (met.rank, met.world_size, met.bootstrap_store_info) == (1, 2, places[1])
    assert not meetings.starts


def test_two_agents_agree_on_the_store_of_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet by torchrun's own rendezvous, one as rank 0, which opens the store."""
    monkeypatch.setenv(SECRET_VARIABLE, new_secret())
    for name, value in NO_SHARED_STORE.items():
        monkeypatch.setenv(name, value)
    address = address_of(LOOPBACK)
    with socket.create_server((address, 0)) as taken:
        port = taken.getsockname()[1]

    # the host's must not end, and with it the store, before the other's
    agents: list[RendezvousHandler] = []
    both_run = threading.Barrier(2, timeout=120)

    def meet(is_host: bool) -> list[tuple[int, int, RendezvousStoreInfo | None]]:
        parameters = RendezvousParameters(
            HOSTS,
            f"{address}:{port}",
            "run",
            2,
            2,
            local_addr=address,
            is_host=is_host,
        )
        agent = rendezvous_handler_registry.create_handler(parameters)
        agents.append(agent)
        found = []
        for _ in range(2):
            met = agent.next_rendezvous()
            both_run.wait()  # an agent leaves a start when its workers do
            found.append((met.rank, met.world_size, met.bootstrap_store_info))
        return found

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(meet, True)
        while is_free(address, port):
            time.sleep(0.05)
        other = pool.submit(meet, False)
        starts = list(zip(one.result(), other.result(), strict=True))
    for own, its in starts:
        assert {own[0], its[0]} == {0, 1}
        assert own[1:] == its[1:]
        assert own[1] == 2
    assert starts[0][0][2] != starts[1][0][2]
