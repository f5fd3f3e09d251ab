"""What the self-test says about the sockets of a run, and that it can fail."""

from __future__ import annotations

import os
import socket
from typing import cast

import pytest

from planner.selfcheck.listening import STEPS, Socket, _judged, _readable, _Watch, listening_sockets


class Seen:
    """What a watch saw."""

    def __init__(self, *addresses: str, was_told: bool = True) -> None:
        self.was_told = was_told
        self.sockets = {
            Socket(os.getpid() + at, address, 1000 + at) for at, address in enumerate(addresses)
        }


def result(seen: Seen, minibatches: int = STEPS) -> tuple[str, str]:
    outcome = _judged(cast("_Watch", seen), minibatches)
    return outcome.result, outcome.found


def test_loopback_alone_passes() -> None:
    told, found = result(Seen("127.0.0.1", "127.0.0.1"))
    assert told == "passed"
    assert "the store of the run at 127.0.0.1, which asks for the secret" in found
    assert "workers for each other at 127.0.0.1, without authentication" in found


@pytest.mark.parametrize("outside", ["0.0.0.0", "10.0.0.1", "::"])
def test_an_address_that_others_reach_fails(outside: str) -> None:
    for addresses in (("127.0.0.1", outside), (outside, "127.0.0.1")):
        told, found = result(Seen(*addresses))
        assert told == "failed"
        assert f"{outside} can be reached from other machines" in found


def test_a_run_that_ended_early_or_whose_store_was_not_seen_fails() -> None:
    assert result(Seen("127.0.0.1", "127.0.0.1"), STEPS - 1)[0] == "failed"
    assert result(Seen("127.0.0.1", "127.0.0.1", was_told=False))[0] == "failed"


def test_addresses_are_read_as_the_kernel_writes_them() -> None:
    assert _readable("0100007F") == "127.0.0.1"
    assert _readable("0000000000000000FFFF00000100007F") == "127.0.0.1"
    assert _readable("00000000000000000000000001000000") == "::1"


def test_a_socket_of_this_process_is_listed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = Socket(os.getpid(), *server.getsockname())
        assert mine in set(listening_sockets())
    assert mine not in set(listening_sockets())
