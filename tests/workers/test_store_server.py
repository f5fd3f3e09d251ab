"""A store of ours listens on one address, which is the one that others reach it at."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.executor.checkpoint.host_memory import HostMemory
from planner.executor.checkpoint.tensor_file import TensorFile
from planner.selfcheck.listening import Socket, listening_sockets
from planner.workers.interfaces import listening_address
from planner.workers.meeting import _listen
from planner.workers.store_server import is_free, open_store


def test_a_store_listens_on_its_address_alone() -> None:
    before = set(listening_sockets())
    store = open_store("127.0.0.1", 0)
    assert set(listening_sockets()) - before == {Socket(os.getpid(), "127.0.0.1", store.port)}
    assert not is_free("127.0.0.1", store.port)
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", store.port)


def test_worker_0_listens_where_others_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = set(listening_sockets())
    store = _listen("localhost", port)
    assert {each.address for each in set(listening_sockets()) - before} == {"127.0.0.1"}
    # Whoever meets others at the same place again, in this process, gets the same store.
    store.set("key", "1")
    assert _listen("localhost", port).get("key") == b"1"


@pytest.mark.parametrize(
    ("answers", "elsewhere", "expected"),
    [
        (["127.0.0.1"], False, "127.0.0.1"),
        # a name that leads to loopback here, as on Debian, and elsewhere to this host
        (["127.0.0.1"], True, None),
        (["192.0.2.1"], True, None),  # of a gateway: no address of this machine
        (["::1", "127.0.0.1"], False, "127.0.0.1"),
    ],
)
def test_a_name_of_this_host(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], elsewhere: bool, expected: str | None
) -> None:
    found = [
        (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0))
        for each in answers
    ]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    assert listening_address("first-host", elsewhere=elsewhere) == expected


def test_loopback_that_was_asked_for_is_loopback() -> None:
    assert listening_address("127.0.0.1", elsewhere=True) == "127.0.0.1"
    assert listening_address("no host has this name.invalid", elsewhere=True) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_copies_are_not_kept_in_a_folder_that_another_user_made(tmp_path: Path) -> None:
    """Everybody may make folders in /dev/shm, and the name of a run's can be guessed."""
    folder = tmp_path / "planner-run"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(InputError, match="belongs to another user"):
        HostMemory(folder).make()
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(InputError, match="belongs to another user"):
        HostMemory(tmp_path / "link").make()


def test_copies_are_for_this_user_alone(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path / "planner-run")
    memory.make()
    memory.make()
    assert memory.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["../weights", "/etc/passwd", "", "a/b", "a\nb"])
def test_the_name_of_a_file_that_another_host_tells_is_no_path(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        TensorFile(name=name, size_bytes=1, sha256="", tensors=())
    assert TensorFile(name="stage-0.weights.safetensors", size_bytes=1, sha256="", tensors=()).name
