"""Several workers of the product in one process: their calls of torch.distributed are carried out, and written down.

Each worker is a thread, and one runs at a time. Messages on NCCL's communicators match by the order of calls alone, and
data arrives: what the workers compute shows whether it was the right data.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from planner.executor.communication.later import Later
from planner.executor.communication.nccl_links import NCCLLinks, _Buffer
from planner.executor.run import lifecycle
from planner.workers import groups
from tests.executor.communication.nccl_rules.rules import (
    DeviceWait,
    Hear,
    HostWait,
    Meeting,
    Operation,
    Post,
    StreamWait,
    Tell,
    Work,
)

TIMEOUT_S = 20


class Group:
    """A process group."""

    def __init__(self, name: str, ranks: Sequence[int], backend: str) -> None:
        self.name, self.ranks, self.backend = name, tuple(ranks), backend


class World:
    """The workers, and what they do."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.recording: dict[int, list[Operation]] = {rank: [] for rank in range(size)}
        self.everyone = Group("control", range(size), "gloo")
        self._changed = threading.Condition()
        self._own = threading.local()
        self._computed: Counter[int] = Counter()  # stream waits, by rank
        self._groups: list[Group] = []
        self._made: Counter[int] = Counter()  # groups, by rank
        self._posts: Counter[tuple[int, str]] = Counter()  # by rank and communicator
        self._given: dict[tuple[str, int], dict[int, Tensor]] = defaultdict(dict)  # by communicator and number
        self._met: Counter[tuple[int, str]] = Counter()
        self._errors: list[BaseException] = []

    @property
    def rank(self) -> int:
        return int(self._own.rank)

    def note(self, operation: Operation) -> None:
        done = self.recording[self.rank]
        self._computed[self.rank] += isinstance(operation, StreamWait)
        if not (isinstance(operation, Work) and done and done[-1] == operation):
            done.append(operation)

    def run(self, worker: Callable[[int], object]) -> dict[int, list[Operation]]:
        """Run `worker` on every rank, and return what their hosts did."""
        threads = [threading.Thread(target=self._run, args=(worker, rank), daemon=True) for rank in range(self.size)]
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
        with self._changed:  # given up only while waiting: one worker runs at a time
            try:
                with _Watch(self):
                    worker(rank)
            except BaseException as error:
                self._errors.append(error)
            self._changed.notify_all()

    def _until(self, come: Callable[[], bool]) -> None:
        """Let other workers run until `come`."""
        found = self._changed.wait_for(lambda: come() or bool(self._errors), TIMEOUT_S)
        assert found, f"rank {self.rank} waits for ever after {self.recording[self.rank][-5:]}"

    # What replaces torch.distributed.

    def new_group(self, ranks: Sequence[int], timeout: object = None, backend: str = "gloo") -> Group:
        number = self._made[self.rank]
        self._made[self.rank] += 1
        if number == len(self._groups):
            self._groups.append(Group(f"group {number}", sorted(ranks), backend))
        group = self._groups[number]
        assert (group.ranks, group.backend) == (tuple(sorted(ranks)), backend), "groups are made in another order"
        self.note(Meeting(f"making of {group.name}"))
        return group

    def isend(self, tensor: Tensor, dst: int, group: Group | None = None, tag: int = 0) -> _Done:
        post = self._post(group, "send", dst)
        self._give(post, tensor)
        return _Done(self, post, None)

    def irecv(self, tensor: Tensor, src: int, group: Group | None = None, tag: int = 0) -> _Done:
        return _Done(self, self._post(group, "receive", src), lambda given: tensor.copy_(given[src]), {src})

    def all_reduce(
        self, tensor: Tensor, op: object = dist.ReduceOp.SUM, group: Group | None = None, async_op: bool = False
    ) -> _Done | None:
        reduce = torch.amax if op == dist.ReduceOp.MAX else torch.sum
        return self._all(tensor, group, lambda given: reduce(torch.stack(given), 0), async_op)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> None:
        members = (group or self.everyone).ranks
        self._all(tensor, group, lambda given: given[members.index(src)])

    def all_gather(self, tensors: list[Tensor], tensor: Tensor, group: Group | None = None) -> None:
        for number, each in enumerate(tensors):
            self._all(each.copy_(tensor), group, itemgetter(number))

    def reduce_scatter_single(self, output: Tensor, rows: Tensor, group: Group, async_op: bool) -> _Done | None:
        own = group.ranks.index(self.rank)
        sums = lambda given: torch.stack(given).sum(0).view(len(given), -1)[own]  # noqa: E731
        return self._all(output, group, sums, async_op, give=rows)

    def all_gather_single(self, rows: Tensor, own: Tensor, group: Group, async_op: bool) -> _Done | None:
        return self._all(rows, group, torch.cat, async_op, give=own)

    def barrier(self, group: Group | None = None) -> None:
        self._all(torch.zeros(1), group, lambda given: given[0])

    def send(self, tensor: Tensor, dst: int, group: Group | None = None) -> None:
        name, number = self._line(self.rank, dst)
        self.note(Tell(f"{name}, {number}"))
        self._put((name, number), tensor)

    def recv(self, tensor: Tensor, src: int, group: Group | None = None) -> None:
        name, number = self._line(src, self.rank)
        self.note(Hear(f"{name}, {number}"))
        self._until(lambda: src in self._given[name, number])
        self._fill(lambda given: tensor.copy_(given[src]), (name, number))

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
        """Give all members `give`, or else `tensor`, and fill `tensor` with what comes of all members' own."""
        group = group or self.everyone

        def fill(given: dict[int, Tensor]) -> None:
            tensor.copy_(combine([given[rank] for rank in group.ranks]))

        if group.backend == "gloo":
            self._met[self.rank, group.name] += 1
            number = self._met[self.rank, group.name]
            self.note(Meeting(f"{group.name}, {number}"))
            self._put((group.name, number), tensor)
            self._until(lambda: len(self._given[group.name, number]) == len(group.ranks))
            self._fill(fill, (group.name, number))
            return None
        post = self._post(group, "all", None)
        self._give(post, tensor if give is None else give)
        done = _Done(self, post, fill, set(group.ranks))
        if async_op:
            return done
        done.wait()
        return None

    def _post(self, group: Group | None, kind: Any, peer: int | None) -> Post:
        assert group is not None
        assert group.backend == "nccl", "gloo's groups carry no data here"
        # PyTorch makes a communicator of two for messages, whatever the group, and one of all for collectives.
        of = "all" if peer is None else f"{min(peer, self.rank)} and {max(peer, self.rank)}"
        communicator = f"{group.name} of {of}"
        computed = getattr(self._own, "free", None)
        if computed is None:
            computed = self._computed[self.rank]
        post = Post(communicator, self._posts[self.rank, communicator], kind, computed)
        self._posts[self.rank, communicator] += 1
        self.note(post)
        return post

    def _give(self, post: Post, tensor: Tensor) -> None:
        self._put((post.communicator, post.number), tensor)

    def _put(self, key: tuple[str, int], tensor: Tensor) -> None:
        with _disable_current_modes():  # what a message is kept in here is no work of the worker's
            self._given[key][self.rank] = tensor.detach().clone()
        self._changed.notify_all()

    def _unseen(self, reader: Callable[[Tensor], object], value: Tensor) -> None:
        with _disable_current_modes():
            reader(value)

    def _fill(self, fill: Callable[[dict[int, Tensor]], object], key: tuple[str, int]) -> None:
        with _disable_current_modes():
            fill(self._given[key])

    def _buffer(self, size_bytes: int, *, fresh: bool) -> Any:
        computed: Any = 0 if fresh else self._computed[self.rank]
        return _Buffer(torch.empty(size_bytes, dtype=torch.uint8), computed)

    @contextmanager
    def _on_side_stream(self, buffer: Any) -> Iterator[None]:
        self._own.free = buffer.free
        yield
        self._own.free = None

    @contextmanager
    def _patched(self) -> Iterator[None]:
        names = ["new_group", "isend", "irecv", "all_reduce", "broadcast", "all_gather", "barrier", "send", "recv"]
        names += ["reduce_scatter_single", "all_gather_single"]
        replaced: dict[str, object] = {name: getattr(self, name) for name in names}
        replaced |= {
            "get_rank": lambda group=None: self.rank if group is None else group.ranks.index(self.rank),
            "get_world_size": lambda group=None: len((group or self.everyone).ranks),
            "get_backend": lambda group=None: (group or self.everyone).backend,
            "group": type("group", (), {"WORLD": self.everyone}),
            "is_initialized": lambda: True,
        }
        with (
            patch.multiple(dist, create=True, **replaced),  # type: ignore[call-overload] # names that PyTorch 2.6 has not
            patch.object(groups, "wait_for_device", lambda _: self.note(DeviceWait())),
            patch.object(lifecycle, "await_all", lambda _: self.barrier()),
            # Where a GPU's event and side stream let a receive begin before what was computed since.
            patch.object(NCCLLinks, "_allocated", lambda _, size: self._buffer(size, fresh=False)),
            patch.object(NCCLLinks, "_fresh", lambda _, size: self._buffer(size, fresh=True)),
            patch.object(NCCLLinks, "_on_side_stream", lambda _, buffer: self._on_side_stream(buffer)),
            # What is read by event makes the host wait nowhere, unless all is asked for.
            patch.object(Later, "read", lambda _, value, reader: self._unseen(reader, value)),
            patch.object(Later, "flush", lambda _: self.note(HostWait())),
        ):
            yield


class _Done:
    """A posted operation."""

    def __init__(
        self,
        world: World,
        post: Post,
        fill: Callable[[dict[int, Tensor]], object] | None,
        givers: frozenset[int] | set[int] = frozenset(),
    ) -> None:
        self._world, self._post, self._fill, self._givers = world, post, fill, givers

    def wait(self) -> None:
        world, key = self._world, (self._post.communicator, self._post.number)
        world.note(StreamWait(self._post))
        if self._fill is not None:
            world._until(lambda: self._givers <= world._given[key].keys())
            world._fill(self._fill, key)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whatever allocates memory or launches a kernel, and what makes the host wait for a number."""

    def __init__(self, world: World) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._world.note(HostWait())
        elif not func.is_view:
            self._world.note(Work())
        return func(*args, **(kwargs or {}))
