"""The links between the workers that torchrun started, level by level -> the Cluster that `plan solve` takes.

Within a host every two neighbouring workers exchange messages, one pair at a time on each host. Between hosts all
workers of a host exchange with those of the next one at once, because they share the host's link. A level is as fast as
the slowest of what was measured on it. As in a pipeline, messages travel both ways at the same time, and follow one
another without a pause.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from planner.errors import InputError, WorkerError
from planner.formats.cluster import Cluster, Level
from planner.profiler.links.pair import BUCKET_BYTES, DEFAULT_MESSAGE_BYTES
from planner.schedule.instructions import POSTED

TIMEOUT_S = 120.0  # for one message
_SHORT_BYTES = 64
_LATENCY_ROUNDS = 100
_SECONDS = 1.0  # for the long messages of one set of pairs
_FIRST_ROUNDS = 3  # in which streams come up to speed
_LEAST_ROUNDS = 8
_SLOW_S = 5.0  # for a message: after the first few there is nothing to gain from more


@dataclass(frozen=True)
class _Exchange:
    """Pairs of ranks that exchange at the same time, and how many of them share one link."""

    pairs: tuple[tuple[int, int], ...]
    sharing: int


def measure_cluster(*, message_bytes: int = DEFAULT_MESSAGE_BYTES, timeout_s: float = TIMEOUT_S) -> Cluster | None:
    """Measure between all workers of this torchrun job; each of them must call this.

    Args:
        message_bytes: length of the long messages.
        timeout_s: for one message.

    Returns:
        On rank 0 the cluster: one level for the workers of a host where it has several, one for the hosts where there
        are several. None on the others.

    Raises:
        InputError: outside torchrun, with a single worker, or with hosts of different sizes.
        WorkerError: when the workers cannot reach each other.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise InputError(
            "the links between workers are measured by those workers, and torchrun did not start this process",
            hint="run on each host: torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT -m planner profile --links",
        )
    torch.set_num_threads(1)
    device = _device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
        try:
            levels = _Measurement(device, message_bytes).levels()
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as cause:  # what torch.distributed raises for lost or unreachable peers
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise WorkerError(
            f"the links cannot be measured: {reason}",
            hint="do all hosts reach each other? GLOO_SOCKET_IFNAME names the network interface to use",
        ) from cause
    return Cluster(levels=levels) if levels else None


def exchanges(hosts: int, workers: int) -> tuple[list[_Exchange], list[_Exchange]]:
    """What is measured one after the other within hosts, and between them.

    Args:
        hosts: how many.
        workers: on each; worker k of host h has rank h * workers + k.
    """
    inner = [
        _Exchange(tuple((h * workers + k, h * workers + k + 1) for h in range(hosts)), 1) for k in range(workers - 1)
    ]
    outer = [
        _Exchange(tuple((h * workers + k, (h + 1) * workers + k) for k in range(workers)), workers)
        for h in range(hosts - 1)
    ]
    return inner, outer


class _Measurement:
    def __init__(self, device: torch.device, message_bytes: int) -> None:
        self._device = device
        self._message_bytes = message_bytes
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._workers = self._common("LOCAL_WORLD_SIZE")
        # Each direction has a group of its own, as in the executor.
        self._groups = [dist.new_group(), dist.new_group()]

    def levels(self) -> tuple[Level, ...]:
        """The levels on rank 0, none elsewhere: rank 0 reports what the slowest saw."""
        if self._world == 1:
            raise InputError("a single worker has no links", hint="start at least two: torchrun --nproc-per-node 2 ...")
        hosts, workers = self._world // self._workers, self._workers
        inner, outer = exchanges(hosts, workers)
        host = [list(range(h * workers, (h + 1) * workers)) for h in range(hosts)]
        across = [list(range(k, self._world, workers)) for k in range(workers)]
        levels = []
        if workers > 1:
            levels.append(self._level(workers, inner, host, sharing=1))
        if hosts > 1:
            levels.append(self._level(hosts, outer, across, sharing=workers))
        return tuple(levels) if self._rank == 0 else ()

    def _level(self, size: int, sets: Sequence[_Exchange], rings: Sequence[Sequence[int]], sharing: int) -> Level:
        speeds = [self._pairs(one) for one in sets]
        return Level(
            size=size,
            bandwidth_bytes_per_s=min(bandwidth for bandwidth, _ in speeds),
            latency_s=max(latency_s for _, latency_s in speeds),
            all_reduce_bandwidth_bytes_per_s=self._all_reduce(rings, size) * sharing,
        )

    def _pairs(self, exchange: _Exchange) -> tuple[float, float]:
        """Bytes per second of the link each way, and the latency of a message."""
        first = _Exchange(exchange.pairs[:1] if exchange.sharing > 1 else exchange.pairs, 1)
        latency_s = self._median_s(first, _SHORT_BYTES, _LATENCY_ROUNDS)
        bandwidth, long_s = self._streams(exchange, self._message_bytes, _FIRST_ROUNDS)
        if long_s < _SLOW_S:
            bandwidth, _ = self._streams(exchange, self._message_bytes, max(_LEAST_ROUNDS, int(_SECONDS / long_s)))
        return bandwidth, latency_s

    def _median_s(self, exchange: _Exchange, size: int, rounds: int) -> float:
        """Median seconds of an exchange of `size` bytes, of the slowest pair: the same number on every rank."""
        peers = {a: b for pair in exchange.pairs for a, b in (pair, pair[::-1])}
        peer = peers.get(self._rank)
        outgoing, incoming = (torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2))
        times = [0.0]
        for _ in range(rounds):
            self._wait_for_all()
            if peer is None:
                continue
            lower = int(self._rank < peer)
            start = time.perf_counter()
            receive = dist.irecv(incoming, src=peer, group=self._groups[1 - lower])
            send = dist.isend(outgoing, dst=peer, group=self._groups[lower])
            for work in (receive, send):
                assert work is not None
                work.wait()
            self._synchronize()
            times.append(time.perf_counter() - start)
        return self._slowest(median(times[1:] or times))

    def _streams(self, exchange: _Exchange, size: int, rounds: int) -> tuple[float, float]:
        """Messages of `size` bytes one after the other, both ways at once.

        `POSTED` of them are open each way, as in a run, so the links never rest: after a pause TCP comes up to speed
        anew, and each time differently. Pairs that share a link do not all get the same part of it, and what one leaves
        the others take: of those all bytes count, and the time until the last has its own.

        Returns:
            Bytes per second of the slowest link, and median seconds from message to message of the slowest pair: the
            same numbers on every rank.
        """
        peer = {a: b for pair in exchange.pairs for a, b in (pair, pair[::-1])}.get(self._rank)
        self._wait_for_all()
        start_s = time.perf_counter()
        ends_s = [] if peer is None else self._arrivals_s(peer, size, rounds)
        between_s = [later - earlier for earlier, later in pairwise(ends_s)]
        interval_s = self._slowest(median(between_s or [0.0]))
        all_s = self._slowest(ends_s[-1] - start_s if ends_s else 0.0)
        return exchange.sharing * rounds * size / all_s if exchange.sharing > 1 else size / interval_s, interval_s

    def _arrivals_s(self, peer: int, size: int, rounds: int) -> list[float]:
        """When each message of `peer` was there."""
        lower = int(self._rank < peer)
        outgoing = torch.zeros(size, dtype=torch.uint8, device=self._device)
        incoming = [torch.zeros_like(outgoing) for _ in range(POSTED)]
        receives: deque[dist.Work] = deque()
        sends: deque[dist.Work] = deque()
        ends_s: list[float] = []
        for number in range(rounds + POSTED):
            if number >= POSTED:
                receives.popleft().wait()
                if self._device.type == "cuda":  # which waits for this message, not for those after it
                    torch.cuda.current_stream().synchronize()
                ends_s.append(time.perf_counter())
                sends.popleft().wait()
            if number < rounds:
                receive = dist.irecv(incoming[number % POSTED], src=peer, group=self._groups[1 - lower])
                send = dist.isend(outgoing, dst=peer, group=self._groups[lower])
                assert receive is not None
                assert send is not None
                receives.append(receive)
                sends.append(send)
        return ends_s

    def _all_reduce(self, rings: Sequence[Sequence[int]], size: int) -> float:
        """Bytes that each worker sends per second while all rings reduce at once: 2(r-1)/r of them per bucket."""
        groups = [dist.new_group(list(ring)) for ring in rings]
        mine = next(group for group, ring in zip(groups, rings, strict=True) if self._rank in ring)
        bucket = torch.ones(BUCKET_BYTES // 4, device=self._device)
        once_s = self._reduce_s(mine, bucket, 2)
        slowest_s = self._reduce_s(mine, bucket, max(3, int(_SECONDS / once_s)))
        return 2 * (size - 1) / size * BUCKET_BYTES / slowest_s

    def _reduce_s(self, group: dist.ProcessGroup | None, bucket: torch.Tensor, rounds: int) -> float:
        times = []
        for _ in range(rounds):
            self._wait_for_all()
            start = time.perf_counter()
            dist.all_reduce(bucket, group=group)
            self._synchronize()
            times.append(time.perf_counter() - start)
        return self._slowest(median(times))

    def _common(self, variable: str) -> int:
        """The value of an environment variable that must be the same for every worker."""
        mine = torch.tensor([int(os.environ.get(variable, "1"))], device=self._device)
        every = [torch.zeros_like(mine) for _ in range(self._world)]
        dist.all_gather(every, mine)
        values = sorted({int(value) for value in every})
        if len(values) > 1:
            raise InputError(
                f"the hosts run different numbers of workers: {', '.join(map(str, values))}",
                hint="start torchrun with the same --nproc-per-node on each",
            )
        return values[0]

    def _slowest(self, seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def _wait_for_all(self) -> None:
        dist.barrier()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _device() -> torch.device:
    """As the executor's: the GPU of the local rank where every local worker can have one, else the CPU."""
    local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_workers:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
