"""How torchrun's agents meet: in a store of ours, which listens on one address and asks for the
secret of the run.

torchrun's own rendezvous opens a store that listens on all addresses of the host, and its agents
unpickle what they read there: whoever reached the port could run code on all hosts. Here they get a
`SecretStore`, which checks the HMAC of all that is read before PyTorch sees it.
"""

import hmac
from contextlib import suppress
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # exported by a star import
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from planner.errors import InputError
from planner.workers.secret import SECRET_VARIABLE, run_secret
from planner.workers.secret_store import Part, SecretStore
from planner.workers.store_server import open_store

# names of the two ways to meet, in torchrun's registry
ONE_HOST = "planner-host"
HOSTS = "planner-hosts"
# in the environment of an agent: see `Agent`
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# How long a start waits for further hosts once the fewest have come, after how many seconds a
# silent one counts as gone, and how long the fewest are waited for.
LAST_CALL_S = 3
SILENT_S = 5
JOIN_S = 600
_TIMEOUT = timedelta(minutes=1)  # for an answer of a store
_WORLD = "agents"  # the key of how many have met


class OneHost(RendezvousHandler):
    """The only agent of a run, which need not wait for another one."""

    def __init__(self, store: TCPStore, run_id: str) -> None:
        self._tcp_store = store
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return True

    def get_backend(self) -> str:
        return ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        place = RendezvousStoreInfo(self._tcp_store.host, self._tcp_store.port)
        store = Part(self._run_id, _asking(self._tcp_store))
        return RendezvousInfo(store, 0, 1, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nobody to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class Agent(RendezvousHandler):
    """An agent of a run on several hosts, which meets the others as torchrun's own agents do.

    Each start has a store of its own, which the agent of its first worker opens before any worker
    begins. torchrun's agents keep the first start's for ever, whose host may be the one that is
    lost, and open it on all addresses: `NO_SHARED_STORE` keeps them from opening any.
    """

    def __init__(self, meeting: RendezvousHandler, address: str | None) -> None:
        self._meeting = meeting
        self._address = address
        self._opened: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return True

    def get_backend(self) -> str:
        return HOSTS

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts, and agree on their number and the store of this start."""
        while True:
            with suppress(DistStoreError):  # that agent was lost before it told where its store is
                met = self._meeting.next_rendezvous()
                place = self._in_new_store(met)
                if place is not None:
                    return RendezvousInfo(met.store, met.rank, met.world_size, place)

    def _in_new_store(self, met: RendezvousInfo) -> RendezvousStoreInfo | None:
        """Return the store of this start; None where another agent has left it already.

        PyTorch counts the agents when it returns, and not when all have met: an agent that is slow
        to return would miss one whose workers have failed meanwhile.
        """
        told = PrefixStore("planner", met.store)
        port = None
        if met.rank == 0:
            assert self._address is not None, "a launcher of ours gives its address"
            self._opened = open_store(self._address, 0)
            port = self._opened.port
            told.set(_WORLD, str(met.world_size))

        place = RendezvousStoreInfo.build(met.rank, told, self._address, port)
        return place if int(told.get(_WORLD)) == met.world_size else None

    def is_closed(self) -> bool:
        return self._meeting.is_closed()

    def set_closed(self) -> None:
        """See base class."""
        self._meeting.set_closed()  # type: ignore[no-untyped-call]  # PyTorch gives it no types

    def num_nodes_waiting(self) -> int:
        return self._meeting.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._meeting.get_run_id()

    def shutdown(self) -> bool:
        return self._meeting.shutdown()


def _asking(store: Store) -> SecretStore:
    secret = run_secret()
    assert secret is not None, f"a launcher of ours sets {SECRET_VARIABLE}"
    return SecretStore(store, secret)


def _one_host(params: RendezvousParameters) -> RendezvousHandler:
    return OneHost(params.get("store"), params.run_id)


def _hosts(params: RendezvousParameters) -> RendezvousHandler:
    host, _, port = params.endpoint.rpartition(":")
    try:
        if params.get_as_bool("is_host"):
            assert params.local_addr is not None
            tcp_store = open_store(params.local_addr, int(port))
        else:
            tcp_store = TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)
        _compare_secrets(tcp_store, params.run_id, params.endpoint)
    except (OSError, RuntimeError) as cause:
        raise RendezvousConnectionError(f"the store at {params.endpoint} is not reached") from cause

    store = _asking(tcp_store)
    meeting: RendezvousHandler = DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        C10dRendezvousBackend(store, params.run_id),
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(join=timedelta(seconds=JOIN_S), last_call=timedelta(seconds=LAST_CALL_S)),
        keep_alive_interval=1,
        keep_alive_max_attempt=SILENT_S,
    )
    return Agent(meeting, params.local_addr)


def _compare_secrets(store: Store, run: str, endpoint: str) -> None:
    """Raise InputError where this host has another secret: it would wait alone, because it would
    read other keys.
    """
    secret = run_secret()
    assert secret is not None, f"a launcher of ours sets {SECRET_VARIABLE}"
    mine = hmac.new(secret, f"run {run}".encode(), "sha256").hexdigest()
    first = store.compare_set(f"planner/secret of {run}", "", mine).decode(errors="replace")
    if not hmac.compare_digest(first.encode(), mine.encode()):
        raise InputError(
            f"the hosts that meet at {endpoint} have another secret than this one",
            hint=f"give all the same file with `secret_file`, or set {SECRET_VARIABLE} to the "
            f"same text on all hosts",
        )


rendezvous_handler_registry.register(ONE_HOST, _one_host)
rendezvous_handler_registry.register(HOSTS, _hosts)
