"""A store by whose values only those are believed who know the secret; otherwise it answers as
PyTorch's does.
"""

from __future__ import annotations

import json
import pickle
import threading
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import (  # type: ignore[attr-defined]  # exported by a star import
    DistStoreError,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from planner.workers.job import Failure
from planner.workers.secret import SECRET_VARIABLE
from planner.workers.secret_store import (
    ForgedValueError,
    Part,
    SecretStore,
    group_keys,
    protected,
    read_record,
)
from planner.workers.store_server import open_store
from planner.workers.watch import cause_in, own_keys
from tests.workers.intruder import FAILURE, Payload

SECRET = b"of this run, and of no other one"


@pytest.fixture
def tcp_store() -> TCPStore:
    """What everybody reaches."""
    return open_store("127.0.0.1", 0, timedelta(seconds=5))


@pytest.fixture
def store(tcp_store: TCPStore) -> SecretStore:
    return SecretStore(tcp_store, SECRET)


def everything(store: Store) -> list[object]:
    """Return the answers of a store to all that is asked of stores here."""
    answers: list[object] = [
        store.check(["a"]),
        store.compare_set("a", "", ""),
        store.compare_set("a", "", "1"),
        store.compare_set("a", "", "2"),
        store.compare_set("a", "1", "3"),
        store.compare_set("missing", "1", "2"),
        store.check(["missing"]),
        store.check(["a"]),
        store.get("a"),
        [store.add("count", 2), store.add("count", 0), store.add("count", -5), store.add("new", 0)],
    ]
    store.set("b", "text")
    store.set("c", "")
    # missing in PyTorch's stub
    store.multi_set(["d", "e"], ["4", "5"])  # type: ignore[attr-defined]
    store.wait(["b", "c"], timedelta(seconds=1))
    return [
        *answers,
        store.multi_get(["b", "c", "d", "e"]),
        store.check(["b", "count"]),
        store.check(["b", "f"]),
    ]


def test_it_answers_as_the_store_behind_it_would(tcp_store: TCPStore, store: SecretStore) -> None:
    expected = everything(Part("plain", tcp_store))
    assert everything(store) == expected
    assert everything(Part("under a prefix", store)) == expected


def test_counts_of_many_are_lost_by_none(tcp_store: TCPStore) -> None:
    def count() -> None:
        client = TCPStore(
            "127.0.0.1", tcp_store.port, is_master=False, timeout=timedelta(seconds=30)
        )
        numbers.extend([SecretStore(client, SECRET).add("count", 1) for _ in range(20)])

    numbers = list[int]()
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [*range(1, 81)]


def test_a_wait_has_the_limit_that_was_set_through_a_prefix(store: SecretStore) -> None:
    part = Part("start", store)
    part.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(DistStoreError):
        part.get("never")


READS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("key"),
    "multi_get": lambda store: store.multi_get(["key"]),
    "compare_set": lambda store: store.compare_set("key", "", "5"),
    "add": lambda store: store.add("key", 1),
}


@pytest.mark.parametrize("read", READS)
def test_a_value_of_who_does_not_know_the_secret_is_refused(
    tcp_store: TCPStore, store: SecretStore, read: str
) -> None:
    name = store._name("key")
    tcp_store.set(name, "7")
    with pytest.raises(
        ForgedValueError, match="holds as 'key' was written by nobody who belongs to the run"
    ):
        READS[read](store)
    SecretStore(tcp_store, b"another secret, as long as this").set("key", "7")
    with pytest.raises(ForgedValueError):
        READS[read](store)


@pytest.mark.parametrize("read", READS)
def test_a_value_cannot_be_moved_to_another_key(
    tcp_store: TCPStore, store: SecretStore, read: str
) -> None:
    store.set("other", "7")
    tcp_store.set(store._name("key"), tcp_store.get(store._name("other")))  # type: ignore[arg-type]
    with pytest.raises(ForgedValueError):
        READS[read](store)


def test_keys_tell_nothing(tcp_store: TCPStore, store: SecretStore) -> None:
    if not hasattr(tcp_store, "list_keys"):
        pytest.skip("this PyTorch does not list keys")
    Part("plan/0", store).set("cause", "0")
    (key,) = tcp_store.list_keys()
    assert "cause" not in key
    assert key.removeprefix("planner/").isalnum()


def test_agents_do_not_unpickle_what_another_wrote(
    tcp_store: TCPStore, store: SecretStore, tmp_path: Path
) -> None:
    backend = C10dRendezvousBackend(store, "run")
    assert backend.get_state() is None
    assert backend.set_state(pickle.dumps("state")) is not None
    answer = backend.get_state()
    assert answer is not None
    assert pickle.loads(answer[0]) == "state"
    forged = b64encode(pickle.dumps(Payload(str(tmp_path / "marker")))).decode()
    tcp_store.set(store._name("torch.rendezvous.run"), forged)
    with pytest.raises(RendezvousConnectionError) as error:
        backend.get_state()
    assert isinstance(error.value.__cause__, ForgedValueError)


def test_without_a_secret_the_store_stays_as_it_is(
    tcp_store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert protected(tcp_store) is tcp_store
    assert group_keys(tcp_store) is tcp_store
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    assert isinstance(protected(tcp_store), SecretStore)
    group_keys(tcp_store).set("address", "1")
    assert not tcp_store.check(["address"])


def test_what_is_no_failure_is_refused_without_a_secret_too(tcp_store: TCPStore) -> None:
    """Such as one that ends with exit code 0."""
    for text in ('{"rank": 1}', "not JSON", json.dumps(FAILURE)):
        tcp_store.set("failure", text)
        with pytest.raises(ForgedValueError):
            read_record(tcp_store, "failure", Failure)


def test_a_cause_that_is_no_worker_is_refused_without_a_secret_too(
    tcp_store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    keys = own_keys(tcp_store)
    assert cause_in(keys) is None
    keys.set("cause", "-1")
    with pytest.raises(ForgedValueError):
        cause_in(keys)
