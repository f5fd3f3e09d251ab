"""torchrun's agents, as elastic runs change them."""

from __future__ import annotations

from torch.distributed import (  # type: ignore[attr-defined]  # exported by a star import
    DistStoreError,
    HashStore,
)
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from planner.workers.interfaces import LOOPBACK, address_of
from planner.workers.rendezvous import Agent, OneHost
from planner.workers.store_server import open_store


class Meeting(OneHost):
    """A meeting of two hosts, which one of them leaves the first time."""

    def __init__(self) -> None:
        super().__init__(open_store(address_of(LOOPBACK), 0), "run")
        self.calls = 0

    def next_rendezvous(self) -> RendezvousInfo:
        self.calls += 1
        if self.calls == 1:
            raise DistStoreError("wait timeout after 60000ms, keys: /MASTER_ADDR")
        return RendezvousInfo(HashStore(), 0, 2, RendezvousStoreInfo("elsewhere", 1))


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
