"""Exchange messages between the processes of a torch.distributed job, and time them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from planner.formats.names import FLOAT_BYTES, Codec
from planner.schedule.instructions import POSTED
from planner.workers.coding import coding_of
from planner.workers.groups import DataGroups

SHORT_BYTES = 64  # so short that only the latency counts
_TURNS = 4  # with and without all-reduces: what disturbs the one disturbs the other


class Endpoint:
    """One process's end of its links.

    All processes of the job make one, with the same pairs.
    """

    def __init__(self, groups: DataGroups, device: torch.device, pairs: Iterable[tuple[int, int]]) -> None:
        self.rank = dist.get_rank()
        self.device = device
        # By sender and receiver. The executor has a group per direction, which is a connection of its own; so has the
        # measurement.
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        both = [ends for pair in pairs for ends in (pair, pair[::-1])]
        if groups.tagged:
            by_direction = {ends: groups.for_collectives(None) for ends in ((0, 1), (1, 0))}
            self._groups = {(a, b): by_direction[int(a > b), int(a < b)] for a, b in both}
        else:
            self._groups = {(sender, receiver): groups.for_messages(sender, receiver) for sender, receiver in both}

    def exchange_s(self, peer: int | None, size: int, rounds: int) -> list[float]:
        """Return the seconds of each exchange of `size` bytes with `peer`, both ways at once; without a peer none.

        All processes of the job must call it, because a barrier precedes each exchange.
        """
        outgoing, incoming = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))

        def exchange(other: int) -> None:
            for work in self._post(other, outgoing, incoming):
                work.wait()

        return self._timed(None if peer is None else lambda: exchange(peer), rounds)

    def arrivals_s(self, peer: int, size: int, rounds: int) -> list[float]:
        """Return the time at which each of `rounds` messages of `peer` arrived, while as many travel the other way.

        `POSTED` messages are open each way, as in a run, so that the link never rests: after a pause TCP speeds up
        anew, and each time differently.
        """
        outgoing = torch.zeros(size, dtype=torch.uint8, device=self.device)
        incoming = [torch.zeros_like(outgoing) for _ in range(POSTED)]
        opened: deque[tuple[dist.Work, dist.Work]] = deque()
        ends_s: list[float] = []
        for number in range(rounds + POSTED):
            if number >= POSTED:
                receive, send = opened.popleft()
                receive.wait()
                if self.device.type == "cuda":
                    # `wait` orders only the stream, not the host. A device-wide wait would include later messages.
                    torch.cuda.current_stream().synchronize()
                ends_s.append(time.perf_counter())
                send.wait()
            if number < rounds:
                opened.append(self._post(peer, outgoing, incoming[number % POSTED]))
        return ends_s

    def all_reduce_s(self, bucket: torch.Tensor, rounds: int, group: dist.ProcessGroup | None = None) -> list[float]:
        """Return the seconds of each all-reduce of gradients like `bucket`; all processes of the job must call it.

        They are copied together and averaged, as in a run: beside the fast links within a host that takes long, too.
        """
        members = dist.get_world_size(group)

        def reduce() -> None:
            flat = torch.empty_like(bucket)
            torch._foreach_copy_([flat], [bucket])
            dist.all_reduce(flat, group=group)
            flat.div_(members)

        return self._timed(reduce, rounds)

    def coding_s(self, codec: Codec, size: int, rounds: int) -> list[float]:
        """Return the seconds of each coding and decoding of a value of `size` bytes, in all processes at once."""
        value = torch.ones(size // FLOAT_BYTES, device=self.device)
        coding, size = coding_of(codec, value.nbytes, value.dtype), codec.size_bytes(value.nbytes, value.itemsize)
        place = coding.place(torch.empty(size, dtype=torch.uint8, device=self.device), 0, value.shape)

        def code() -> None:
            coding.write(place, value)
            coding.read(place, value.dtype, value.shape)

        return self._timed(code, rounds)

    def added_s(self, size: int, rounds: int, group: dist.ProcessGroup | None = None) -> float:
        """Return the seconds that an all-reduce of `size` bytes adds to computations that make and use them.

        It waits for the slowest process, and for threads and memory that were at work until then, and leaves the sum
        where the next computation has to fetch it from. Right after another all-reduce it is several times as fast.
        """
        # Zeros stay zeros, where other numbers would soon be infinite or too small for full speed.
        few, many = torch.zeros(512, 512, device=self.device), torch.zeros(size // 4 // 512, 512, device=self.device)
        taken_s = {True: 0.0, False: 0.0}
        for sums in (True, False) * _TURNS:
            self.wait_for_all()
            start_s = time.perf_counter()
            for _ in range(rounds):
                many = torch.mm(torch.mm(many + many, few), few)
                if sums:
                    dist.all_reduce(many, group=group)
            self._synchronize()
            taken_s[sums] += time.perf_counter() - start_s
        return (taken_s[True] - taken_s[False]) / (_TURNS * rounds)

    def wait_for_all(self) -> None:
        """Wait until all processes are here and this one's device is idle."""
        dist.barrier()
        self._synchronize()

    def _timed(self, action: Callable[[], object] | None, rounds: int) -> list[float]:
        times_s = []
        for _ in range(rounds):
            self.wait_for_all()
            if action is not None:
                start_s = time.perf_counter()
                action()
                self._synchronize()
                times_s.append(time.perf_counter() - start_s)
        return times_s

    def _post(self, peer: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> tuple[dist.Work, dist.Work]:
        # Each direction is a communicator of its own, made before: neither call waits for the peer, so neither end can
        # keep the other from its second.
        receive = dist.irecv(incoming, src=peer, group=self._groups[peer, self.rank])
        send = dist.isend(outgoing, dst=peer, group=self._groups[self.rank, peer])
        assert receive is not None
        assert send is not None
        return receive, send

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
