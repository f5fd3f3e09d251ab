"""Measure the links between workers, level by level -> the Cluster that `plan solve` takes.

Within a host, neighbouring workers exchange messages, one pair at a time on each host. Between hosts, all workers of a
host exchange with those of the next one at once, because they share the host's link. A level is as fast as its slowest
measurement. As in a pipeline, messages travel both ways at the same time, and follow one another without a pause.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import cast

import torch
import torch.distributed as dist

from planner.errors import InputError, PlannerError, WorkerError, first_line
from planner.formats.cluster import Cluster, CodecTime, Level, load_cluster, save_cluster
from planner.formats.names import CODECS, FLOAT_BYTES, Backend, DeviceType
from planner.profiler.links.exchange import SHORT_BYTES, Endpoint
from planner.profiler.this_machine import keep_freed_pages
from planner.workers.groups import GLOO, DataGroups
from planner.workers.meeting import exchange, started_as_worker, worker_store
from planner.workers.place import Place, choose_place, cores_to_send, own_seat, set_cuda_variables, take

MESSAGE_BYTES = 4_000_000
BUCKET_BYTES = 25_000_000  # the executor's largest bucket
TIMEOUT_S = 120.0  # for one message
_SMALL_SUM_BYTES = 2**18
_LATENCY_ROUNDS = 100
_SECONDS = 1.0  # for the long messages of one set of pairs
_CODECS = [codec for codec in CODECS.values() if codec.element_bytes]
_CODINGS = 10  # of each codec
_FIRST_ROUNDS = 3  # in which TCP comes up to speed
_LEAST_ROUNDS = 8
_SLOW_S = 5.0  # a message that takes longer is not repeated: the first few rounds are accurate enough


@dataclass(frozen=True)
class Exchange:
    """Pairs of ranks that exchange at the same time.

    Attributes:
        pairs: the ranks.
        sharing: how many of the pairs share one link.
    """

    pairs: tuple[tuple[int, int], ...]
    sharing: int

    def peer_of(self, rank: int) -> int | None:
        """Return the rank that `rank` exchanges with; None where it only waits."""
        return {a: b for pair in self.pairs for a, b in (pair, pair[::-1])}.get(rank)


def measure_cluster(
    *,
    message_bytes: int = MESSAGE_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float = TIMEOUT_S,
    device: DeviceType | None = None,
    backend: Backend | None = None,
) -> Cluster | None:
    """Measure the links between all workers of this torchrun job; each of them must call this.

    Args:
        device: that messages come from: "cpu" or "cuda"; None for GPUs where there are any.
        backend: that sends them: "gloo" or "nccl"; None for NCCL with GPUs.

    Returns:
        On rank 0 the cluster: one level for the workers of a host where it has several, one for the hosts where there
        are several. None on the others. Where a host's workers compute on all of its cores, messages do not overlap
        with computation.

    Raises:
        InputError: outside torchrun, with a single worker, or with hosts of different sizes.
        WorkerError: when the workers cannot reach each other.
    """
    if not started_as_worker():
        raise InputError(
            "the links between workers are measured by those workers, and torchrun did not start this process",
            hint="run the same command on each host under torchrun: torchrun --nnodes 2 --nproc-per-node 1 "
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT -m planner ...",
        )
    torch.set_num_threads(1)
    set_cuda_variables()
    rank, world, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    try:
        store = worker_store(timeout)
        place = choose_place(exchange(store, own_seat()), rank, device, backend)
        take(place)
        dist.init_process_group(GLOO, store=store, rank=rank, world_size=world, timeout=timeout)
        try:
            measurement = _LevelMeasurement(place, timeout, message_bytes, bucket_bytes)
            levels, times, overlap = measurement.levels(), measurement.codec_times(), measurement.overlap
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as cause:  # what torch.distributed raises for lost or unreachable peers
        raise WorkerError(
            f"the links cannot be measured: {first_line(cause)}",
            hint="do all hosts reach each other? GLOO_SOCKET_IFNAME names the network interface to use",
        ) from cause
    if not levels:
        return None
    return Cluster(levels=levels, backend=place.backend, overlap=overlap, codec_times=times)


def exchanges(hosts: int, workers: int) -> tuple[list[Exchange], list[Exchange]]:
    """Return the exchanges within hosts and those between them; each list is measured one after the other.

    Args:
        workers: on each; worker k of host h has rank h * workers + k.
    """
    inner = [
        Exchange(tuple((h * workers + k, h * workers + k + 1) for h in range(hosts)), 1) for k in range(workers - 1)
    ]
    outer = [
        Exchange(tuple((h * workers + k, (h + 1) * workers + k) for k in range(workers)), workers)
        for h in range(hosts - 1)
    ]
    return inner, outer


class _LevelMeasurement:
    """Measures each level of the job's cluster.

    Each number is the slowest rank's, by a maximum over all. So it is the same on every rank, as the rounds that follow
    from it must be. What is measured goes through groups for data; the rest, and the order of all, through the default
    group, which is of gloo.
    """

    def __init__(self, place: Place, timeout: timedelta, message_bytes: int, bucket_bytes: int) -> None:
        self._device = place.wire
        self._message_bytes = message_bytes
        self._bucket_bytes = bucket_bytes
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        if self._world == 1:
            raise InputError("a single worker has no links", hint="start at least two: torchrun --nproc-per-node 2 ...")
        workers = self._workers = self._common("LOCAL_WORLD_SIZE")
        hosts = self._hosts = self._world // workers
        self._inner, self._outer = exchanges(hosts, workers)
        groups = DataGroups(place, timeout)
        pairs = [pair for one in (*self._inner, *self._outer) for pair in one.pairs]
        self._end = Endpoint(groups, place.wire, pairs)
        within = [range(h * workers, (h + 1) * workers) for h in range(hosts)]
        across = [range(k, self._world, workers) for k in range(workers)]
        # Every worker makes every group, those that it is not in included.
        self._within, self._across = (
            [groups.for_collectives(ring) for ring in rings if len(ring) > 1] for rings in (within, across)
        )
        groups.use_once()
        spare = place.kind != "cpu" or cores_to_send(workers)
        self.overlap = not self._slowest(0.0 if spare else 1.0)  # where every host has cores to send with

    def levels(self) -> tuple[Level, ...]:
        """Return the levels on rank 0, none elsewhere."""
        levels = []
        if self._workers > 1:
            levels.append(self._level(self._workers, self._inner, self._within[self._rank // self._workers], sharing=1))
        if self._hosts > 1:
            levels.append(
                self._level(self._hosts, self._outer, self._across[self._rank % self._workers], sharing=self._workers)
            )
        return tuple(levels) if self._rank == 0 else ()

    def codec_times(self) -> tuple[CodecTime, ...]:
        """Return what the codecs take: half of it at each end."""
        keep_freed_pages()  # as the workers do
        rates = []
        for codec in _CODECS:
            taken_s = self._slowest(median(self._end.coding_s(codec, self._message_bytes, _CODINGS)))
            rates.append(taken_s / (2 * codec.size_bytes(self._message_bytes, FLOAT_BYTES)))
        return tuple(CodecTime(codec=codec.name, s_per_byte=rate) for codec, rate in zip(_CODECS, rates, strict=True))

    def _level(self, size: int, sets: Sequence[Exchange], ring: dist.ProcessGroup, sharing: int) -> Level:
        speeds = [self._pairs(one) for one in sets]
        latency_s, reduced_per_s = max(latency_s for _, latency_s in speeds), self._all_reduce(ring, size)
        summed_per_s, sum_latency_s = self._sums(ring, size, reduced_per_s)
        return Level(
            size=size,
            bandwidth_bytes_per_s=min(bandwidth for bandwidth, _ in speeds),
            latency_s=latency_s,
            all_reduce_bandwidth_bytes_per_s=reduced_per_s * sharing,
            sum_bandwidth_bytes_per_s=summed_per_s * sharing,
            sum_latency_s=max(latency_s, sum_latency_s),
        )

    def _pairs(self, exchange: Exchange) -> tuple[float, float]:
        """Return the bytes per second of the link each way, and the latency of a message."""
        # Pairs that share a link would wait for each other's messages, which is no latency.
        first = Exchange(exchange.pairs[:1] if exchange.sharing > 1 else exchange.pairs, 1)
        times_s = self._end.exchange_s(first.peer_of(self._rank), SHORT_BYTES, _LATENCY_ROUNDS)
        latency_s = self._slowest(median(times_s or [0.0]))
        bandwidth, long_s = self._streams(exchange, _FIRST_ROUNDS)
        if long_s < _SLOW_S:
            bandwidth, _ = self._streams(exchange, max(_LEAST_ROUNDS, int(_SECONDS / long_s)))
        return bandwidth, latency_s

    def _streams(self, exchange: Exchange, rounds: int) -> tuple[float, float]:
        """Send long messages one after the other, both ways at once.

        Pairs that share a link do not all get the same part of it, and what one leaves the others take. So for those
        all bytes count, until the last pair is done; a pair that has a link to itself has the median between messages.

        Returns:
            Bytes per second of the slowest link, and median seconds from message to message of the slowest pair.
        """
        peer, size = exchange.peer_of(self._rank), self._message_bytes
        self._end.wait_for_all()
        start_s = time.perf_counter()
        ends_s = [] if peer is None else self._end.arrivals_s(peer, size, rounds)
        between_s = [later - earlier for earlier, later in pairwise(ends_s)]
        interval_s = self._slowest(median(between_s or [0.0]))
        all_s = self._slowest(ends_s[-1] - start_s if ends_s else 0.0)
        return exchange.sharing * rounds * size / all_s if exchange.sharing > 1 else size / interval_s, interval_s

    def _all_reduce(self, ring: dist.ProcessGroup, size: int) -> float:
        """Return the bytes that each worker sends per second, 2(r-1)/r per bucket, while all rings reduce at once."""
        bucket = torch.ones(self._bucket_bytes // 4, device=self._device)
        once_s = self._slowest(median(self._end.all_reduce_s(bucket, 2, ring)))
        rounds = max(3, int(_SECONDS / once_s))
        slowest_s = self._slowest(median(self._end.all_reduce_s(bucket, rounds, ring)))
        return 2 * (size - 1) / size * self._bucket_bytes / slowest_s

    def _sums(self, ring: dist.ProcessGroup, size: int, reduced_per_s: float) -> tuple[float, float]:
        """Return the bytes per second and the latency of a step of all-reduces between computations, by two sizes."""
        small, large = _SMALL_SUM_BYTES, max(2 * _SMALL_SUM_BYTES, self._message_bytes)
        rounds = [int(min(20, 2**25 / each, _SECONDS / 8 * reduced_per_s / each)) for each in (small, large)]
        small_s, large_s = (
            self._slowest(self._end.added_s(each, max(2, count), ring))
            for each, count in zip((small, large), rounds, strict=True)
        )
        steps = 2 * (size - 1)
        moved = steps / size * (large - small)
        # Where something disturbed the measurement so much that the larger one was no slower, gradients' rate counts.
        rate = moved / (large_s - small_s) if large_s > small_s else reduced_per_s
        return rate, (small_s - steps / size * small / rate) / steps

    def _common(self, variable: str) -> int:
        """Return the value of an environment variable that must be the same for every worker."""
        mine = torch.tensor([int(os.environ.get(variable, "1"))])
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
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)


_LIMIT_S = 300.0
_DEFAULT = "default"


def measure_host(workers: int, device: DeviceType, backend: Backend | None = None) -> Cluster:
    """Return the cluster that so many workers of this host are.

    Args:
        workers: at least two.
        backend: that they send with; None for what suits the device.

    Raises:
        InputError: when the device or the backend is not there.
        WorkerError: when the links cannot be measured.
    """
    with tempfile.TemporaryDirectory(prefix="plan-links-") as folder:
        torchrun = ["torch.distributed.run", f"--nproc-per-node={workers}", "--rdzv-backend=c10d"]
        torchrun += ["--rdzv-endpoint=127.0.0.1:0", "--max-restarts=0", "-m", __name__]  # of torchrun
        command = [sys.executable, "-m", *torchrun, folder, device, backend or _DEFAULT]
        loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
        environment = {**loopback, "OMP_NUM_THREADS": "1", **os.environ}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as launcher:
            try:
                _, complaints = launcher.communicate(timeout=_LIMIT_S)
            except subprocess.TimeoutExpired:
                # Not killed: torchrun then ends its workers, which have sessions of their own.
                launcher.terminate()
                raise WorkerError(f"the links were not measured within {_LIMIT_S:g} s") from None
        reasons = sorted(Path(folder).glob("error-*"))
        if reasons:
            told = json.loads(reasons[0].read_text(encoding="utf-8"))
            kind = InputError if told["exit_code"] == InputError.exit_code else WorkerError
            raise kind(told["message"], hint=told["hint"])
        if launcher.returncode:
            last = (complaints.strip().splitlines() or [f"exit code {launcher.returncode}"])[-1]
            raise WorkerError(f"the links cannot be measured: {last}")
        return load_cluster(Path(folder) / "cluster.json")


def _worker(folder: Path, device: DeviceType, backend: Backend | None) -> None:
    try:
        cluster = measure_cluster(device=device, backend=backend)
    except PlannerError as error:
        told = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        (folder / f"error-{os.environ['RANK']}").write_text(json.dumps(told), encoding="utf-8")
        sys.exit(error.exit_code)
    if cluster is not None:  # rank 0
        save_cluster(cluster, folder / "cluster.json")


if __name__ == "__main__":
    asked = None if sys.argv[3] == _DEFAULT else cast("Backend", sys.argv[3])
    _worker(Path(sys.argv[1]), cast("DeviceType", sys.argv[2]), asked)
    os._exit(0)  # torch's teardown at interpreter exit now and then never ends when gloo was used
