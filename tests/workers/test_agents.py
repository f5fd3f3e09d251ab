"""torchrun's agents, as elastic runs change them."""

from __future__ import annotations

from typing import cast
from unittest.mock import patch

from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from planner.workers.rendezvous import Agent


def test_each_start_has_a_new_store_and_an_agent_that_was_lost_is_not_waited_for_again() -> None:
    """The agent that opens the store is lost after all have met: the others meet again, and do not
    end.
    """
    agent = Agent.__new__(Agent)
    agent._bootstrap_store_info = None
    calls = list[object]()

    def join(asked: DynamicRendezvousHandler) -> str:
        assert asked is agent
        calls.append(agent._bootstrap_store_info)
        if len(calls) == 1:
            raise DistStoreError("wait timeout after 60000ms, keys: /MASTER_ADDR")
        agent._bootstrap_store_info = "that of this start"  # type: ignore[assignment]
        return "joined"

    with patch.object(DynamicRendezvousHandler, "next_rendezvous", join):
        assert cast("object", agent.next_rendezvous()) == "joined"
        assert cast("object", agent.next_rendezvous()) == "joined"
    assert calls == [None, None, None]
