"""Several workers of the product in one process: their calls of torch.distributed are carried out,
and written down.

Each worker is a thread, and one runs at a time. Messages on NCCL's communicators match by the order
of calls alone, and data arrives: what the workers compute shows whether it was the right data. What
they give to their devices is also done there, in another order: see `simulated`.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch exports `HashStore` by a star import.
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from planner.executor.communication.links import End
from planner.executor.run import comparison, context
from planner.model.tensor.group import TensorGroup
from tests.executor.device.rules import (
    Hear,
    Meeting,
    NCCLDeadlock,
    Operation,
    Post,
    StreamWait,
    Tell,
    Work,
)
from tests.executor.device.simulated import (
    Devices,
    Mark,
    Message,
    OnDevice,
    RaceError,
    SimulatedRuntime,
)
from tests.runtimes import registered

TIMEOUT_S = 120
_TOLIST = Tensor.tolist


class Group:
    """A process group."""

    def __init__(self, name: str, ranks: Sequence[int], backend: str) -> None:
        self.name, self.ranks, self.backend = name, tuple(ranks), backend
        self.options: list[Any] = []  # what its makers gave


class World:
    """The workers, and what they do."""

    def __init__(self, size: int, seed: int | None = None, *, buffered: bool = False) -> None:
        self.size = size
        self.devices = Devices(self, seed, buffered=buffered)
        self.recording: dict[int, list[Operation]] = {rank: [] for rank in range(size)}
        self.results: dict[tuple[int, str], Tensor] = {}  # by rank and name
        self.everyone = Group("control", range(size), "gloo")
        self._changed = threading.Condition()
        self._own = threading.local()
        self._version = 0  # of what workers wait for
        # the version at which a worker found nothing to do, by rank
        self._idle: dict[int, int] = {}
        self.groups: list[Group] = []
        self._made: Counter[int] = Counter()  # groups, by rank
        self._posts: Counter[tuple[int, str]] = Counter()  # by rank and communicator
        # by communicator and number
        self._given: dict[tuple[str, int], dict[int, Tensor]] = defaultdict(dict)
        self._met: Counter[tuple[int, str]] = Counter()
        self._come: defaultdict[str, set[int]] = defaultdict(set)  # who has used each communicator
        # functional collectives to wait for, by what holds their results
        self._functional: dict[int, _Done] = {}
        self._errors: list[BaseException] = []
        self._store = HashStore()  # of digests of batches

    @property
    def rank(self) -> int:
        return int(self._own.rank)

    def note(self, operation: Operation) -> None:
        done = self.recording[self.rank]
        if not (isinstance(operation, Work) and done and done[-1] == operation):
            done.append(operation)

    def run(self, worker: Callable[[int], object]) -> dict[int, list[Operation]]:
        """Run `worker` on every rank, and return what their hosts did."""
        threads = [
            threading.Thread(target=self._run, args=(worker, rank), daemon=True)
            for rank in range(self.size)
        ]
        with self._patched():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_S)
                assert not thread.is_alive(), "a worker waits for ever"
        if self._errors:
            raise self._errors[0]
        return self.recording

    def _run(self, worker: Callable[[int], object], rank: int) -> None:
        self._own.rank = rank
        # of this thread: several add up in an order that differs between two equal runs
        torch.set_num_threads(1)
        with self._changed:  # given up only while waiting: one worker runs at a time
            try:
                with OnDevice(self, self.devices):
                    worker(rank)
            except BaseException as error:
                self._errors.append(error)
            self._idle[rank] = sys.maxsize
            self.tell()

    def tell(self) -> None:
        """Let the others look whether what they wait for has come."""
        self._version += 1
        self._changed.notify_all()

    def until(self, come: Callable[[], bool]) -> None:
        """Let other workers run until `come`.

        Raises:
            NCCLDeadlock: when all workers wait.
        """

        def found() -> bool:
            if come() or self._errors:
                return True
            self._idle[self.rank] = self._version
            if len(self._idle) == self.size and all(
                version >= self._version for version in self._idle.values()
            ):
                raise NCCLDeadlock(
                    f"all wait, rank {self.rank} after {self.recording[self.rank][-5:]}"
                )
            return False

        there = self._changed.wait_for(found, TIMEOUT_S)
        self._idle.pop(self.rank, None)
        assert there, f"rank {self.rank} waits for ever after {self.recording[self.rank][-5:]}"
        if self._errors:
            raise _OthersFailedError from self._errors[0]

    # What replaces torch.distributed.

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: object = None,
        backend: str = "gloo",
        pg_options: Any = None,
    ) -> Group:
        number = self._made[self.rank]
        self._made[self.rank] += 1
        if number == len(self.groups):
            self.groups.append(Group(f"group {number}", sorted(ranks), backend))
        group = self.groups[number]
        group.options.append(pg_options)
        assert (group.ranks, group.backend) == (tuple(sorted(ranks)), backend), (
            "groups are made in another order"
        )
        self.note(Meeting(f"making of {group.name}"))
        return group

    def isend(self, tensor: Tensor, dst: int, group: Group | None = None, tag: int = 0) -> _Done:
        return self._post(group, "send", dst, tensor, None, None)

    def irecv(self, tensor: Tensor, src: int, group: Group | None = None, tag: int = 0) -> _Done:
        return self._post(
            group, "receive", src, None, tensor, lambda given: tensor.copy_(given[src])
        )

    def all_reduce(
        self,
        tensor: Tensor,
        op: object = dist.ReduceOp.SUM,
        group: Group | None = None,
        async_op: bool = False,
    ) -> _Done | None:
        reduce = torch.amax if op == dist.ReduceOp.MAX else torch.sum
        return self._all(tensor, group, lambda given: reduce(torch.stack(given), 0), async_op)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> None:
        members = (group or self.everyone).ranks
        self._all(tensor, group, lambda given: given[members.index(src)])

    def all_gather(self, tensors: list[Tensor], tensor: Tensor, group: Group | None = None) -> None:
        for number, each in enumerate(tensors):
            self._all(each.copy_(tensor), group, itemgetter(number))

    def reduce_scatter_single(
        self, output: Tensor, rows: Tensor, group: Group, async_op: bool
    ) -> _Done | None:
        own = group.ranks.index(self.rank)
        sums = lambda given: torch.stack(given).sum(0).view(len(given), -1)[own]  # noqa: E731
        return self._all(output, group, sums, async_op, give=rows)

    def all_gather_single(
        self, rows: Tensor, own: Tensor, group: Group, async_op: bool
    ) -> _Done | None:
        return self._all(rows, group, torch.cat, async_op, give=own)

    def barrier(self, group: Group | None = None) -> None:
        self._all(torch.zeros(1), group, lambda given: given[0])

    def send(self, tensor: Tensor, dst: int, group: Group | None = None) -> None:
        name, number = self._line(self.rank, dst)
        self.note(Tell(f"{name}, {number}"))
        self.devices.to_host(tensor)
        self._put((name, number), tensor)

    def recv(self, tensor: Tensor, src: int, group: Group | None = None) -> None:
        name, number = self._line(src, self.rank)
        self.note(Hear(f"{name}, {number}"))
        self.devices.to_host(tensor)
        self.until(lambda: src in self._given[name, number])
        self._fill(lambda given: tensor.copy_(given[src]), (name, number))

    @property
    def functional(self) -> dict[str, Callable[..., Tensor]]:
        """Functional collectives, which DTensors ask for, by the names of PyTorch's operations."""
        return {
            "all_reduce": self._reduced,
            "all_gather_into_tensor": self._gathered,
            "wait_tensor": self._awaited,
        }

    def _reduced(self, value: Tensor, op: str, group: str) -> Tensor:
        assert op == "sum"
        return self._posted(value.clone(), group, lambda given: torch.stack(given).sum(0))

    def _gathered(self, value: Tensor, size: int, group: str) -> Tensor:
        rows = value.new_empty(size * value.shape[0], *value.shape[1:])
        return self._posted(rows, group, torch.cat, give=value)

    def _awaited(self, value: Tensor) -> Tensor:
        done = self._functional.pop(value.untyped_storage()._cdata, None)
        if done is not None:
            done.wait()
        return value

    def _posted(
        self,
        result: Tensor,
        group: str,
        combine: Callable[[list[Tensor]], Tensor],
        give: Tensor | None = None,
    ) -> Tensor:
        done = self._all(result, self._named(group), combine, async_op=True, give=give)
        assert done is not None
        self._functional[result.untyped_storage()._cdata] = done
        return result

    def _named(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def _connect(self, tensor: TensorGroup, group: Group, _: torch.device) -> None:
        with _disable_current_modes():
            tensor._mesh = DeviceMesh(
                "cpu", torch.tensor(group.ranks), _init_backend=False, _rank=self.rank
            )
        names: Any = [group.name]
        tensor._mesh._dim_group_names = names

    def _line(self, sender: int, receiver: int) -> tuple[str, int]:
        name = f"from {sender} to {receiver}"
        self._posts[self.rank, name] += 1
        return name, self._posts[self.rank, name]

    def _all(
        self,
        tensor: Tensor,
        group: Group | None,
        combine: Callable[[list[Tensor]], Tensor],
        async_op: bool = False,
        give: Tensor | None = None,
    ) -> _Done | None:
        """Give all members `give`, or else `tensor`, and fill `tensor` with what comes of all
        members' own.
        """
        group = group or self.everyone

        def fill(given: dict[int, Tensor]) -> None:
            tensor.copy_(combine([given[rank] for rank in group.ranks]))

        if group.backend == "gloo":
            self.devices.to_host(tensor)
            self._met[self.rank, group.name] += 1
            number = self._met[self.rank, group.name]
            self.note(Meeting(f"{group.name}, {number}"))
            self._put((group.name, number), tensor)
            self.until(lambda: len(self._given[group.name, number]) == len(group.ranks))
            self._fill(fill, (group.name, number))
            return None
        done = self._post(
            group, "all", None, tensor if give is None else give, tensor, fill, combine
        )
        if async_op:
            return done
        done.wait()
        return None

    def _post(
        self,
        group: Group | None,
        kind: Any,
        peer: int | None,
        given: Tensor | None,
        taken: Tensor | None,
        fill: Callable[[dict[int, Tensor]], object] | None,
        combine: Callable[[list[Tensor]], Tensor] | None = None,
    ) -> _Done:
        assert group is not None
        assert group.backend == "nccl", "gloo's groups carry no data here"
        # PyTorch makes a communicator of two for messages, whatever the group, and one of all for
        # collectives.
        of = "all" if peer is None else f"{min(peer, self.rank)} and {max(peer, self.rank)}"
        communicator = f"{group.name} of {of}"
        number = self._posts[self.rank, communicator]
        self._posts[self.rank, communicator] += 1
        post = Post(communicator, number, kind, self.devices.current().computed)
        self.note(post)
        members = group.ranks if peer is None else (peer, self.rank)
        if number == 0:
            under_way = self.devices.messages_under_way(self.rank)
            if under_way:
                raise RaceError(
                    f"rank {self.rank} makes {communicator} while {under_way[0].key} is under way"
                )
            self._come[communicator].add(self.rank)
            self.tell()
            self.until(lambda: self._come[communicator] >= set(members))
        devices, key = self.devices, (communicator, number)
        ended = Mark(0)
        message = Message(
            key=key,
            kind=kind,
            members=len(members),
            given=None if given is None else devices.view(given),
            taken=None if taken is None else devices.view(taken),
            combine=combine,
            rank=self.rank,
            ended=ended,
        )
        if given is not None:
            self._put(key, given)
        devices.post(message, communicator)
        givers = set(members) if peer is None else {peer} if given is None else set()
        return _Done(self, post, ended, fill, givers)

    def _put(self, key: tuple[str, int], tensor: Tensor) -> None:
        with _disable_current_modes():  # what a message is kept in here is no work of the worker's
            self._given[key][self.rank] = tensor.detach().clone()
        self.tell()

    def _fill(self, fill: Callable[[dict[int, Tensor]], object], key: tuple[str, int]) -> None:
        with _disable_current_modes(), torch.no_grad():
            fill(self._given[key])

    @contextmanager
    def _patched(self) -> Iterator[None]:
        names = [
            "new_group",
            "isend",
            "irecv",
            "all_reduce",
            "broadcast",
            "all_gather",
            "barrier",
            "send",
            "recv",
        ]
        names += ["reduce_scatter_single", "all_gather_single"]
        replaced: dict[str, object] = {name: getattr(self, name) for name in names}
        replaced |= {
            "get_rank": lambda group=None: (
                self.rank if group is None else group.ranks.index(self.rank)
            ),
            "get_group_rank": lambda group, rank: group.ranks.index(rank),
            "get_world_size": lambda group=None: len((group or self.everyone).ranks),
            "get_backend": lambda group=None: (group or self.everyone).backend,
            "group": type("group", (), {"WORLD": self.everyone}),
            "is_initialized": lambda: True,
            "is_nccl_available": lambda: True,
            "ProcessGroupNCCL": SimpleNamespace(
                Options=lambda: SimpleNamespace(config=SimpleNamespace())
            ),
        }
        with (
            # Some are names that PyTorch 2.6 has not.
            patch.multiple(dist, create=True, **replaced),  # type: ignore[call-overload]
            patch.object(context, "await_all", lambda _: self.barrier()),
            patch.object(comparison, "worker_store", lambda _: self._store),
            patch.object(comparison, "nth_time", lambda *_: 1),
            patch.object(Tensor, "tolist", lambda tensor: self._listed(tensor)),
            patch.object(
                distributed_c10d,
                "_get_group_size_by_name",
                lambda name: len(self._named(name).ranks),
            ),
            patch.object(TensorGroup, "connect", lambda *of: self._connect(*of)),
            patch.object(
                End, "send", lambda end, message: self.isend(message, end.peer, end.group)
            ),
            patch.object(
                End, "receive", lambda end, message: self.irecv(message, end.peer, end.group)
            ),
            registered("cpu", SimulatedRuntime(self.devices)),
        ):
            yield

    def _listed(self, tensor: Tensor) -> Any:
        self.devices.read(tensor)
        with _disable_current_modes():
            return _TOLIST(tensor)


class _Done:
    """A posted operation."""

    def __init__(
        self,
        world: World,
        post: Post,
        ended: Mark,
        fill: Callable[[dict[int, Tensor]], object] | None,
        givers: set[int],
    ) -> None:
        self._world, self._post, self._ended, self._fill, self._givers = (
            world,
            post,
            ended,
            fill,
            givers,
        )

    def wait(self) -> None:
        """Let the current stream wait, as NCCL does; for its values in the host's order the host
        waits, too.
        """
        world, key = self._world, (self._post.communicator, self._post.number)
        world.note(StreamWait(self._post))
        stream = world.devices.current()
        stream.computed += 1
        stream.wait_for(self._ended)
        if self._fill is not None:
            world.until(lambda: self._givers <= world._given[key].keys())
            world._fill(self._fill, key)


class _OthersFailedError(Exception):
    """Ends a worker whose peers have failed."""
