"""Time messages, all-reduces and codecs between the processes of a torch.distributed job, level by
level.

Within a host, neighbouring workers exchange messages, one pair at a time on each host. Between
hosts, all workers of a host exchange with those of the next one at once, because they share the
host's link. All-reduces are measured twice there: as many rings at once as a host has workers, and
one ring over all workers, which enters and leaves each host once and may reach less of its link. A
level is as fast as its slowest measurement. As in a pipeline, messages travel both
ways at the same time, and follow one another without a pause. All of it is done in several turns,
of which the median counts.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from planner.errors import InputError
from planner.formats.cluster import RATES, WAITS, CodecTime, Level
from planner.formats.files import replace
from planner.formats.names import CODECS, FLOAT_BYTES, Codec
from planner.model.tensor.row_exchange import exchange_over, over_gloo
from planner.profiler.links.effort import (
    FIRST_ROUNDS,
    PRODUCT_PAIRS,
    SMALL_SUM_BYTES,
    UNITS,
    Effort,
    Pace,
    fitting_effort,
)
from planner.profiler.this_machine import keep_freed_pages
from planner.runtime import runtime_of
from planner.schedule.instructions import POSTED
from planner.workers.coding import coding_of
from planner.workers.groups import DataGroups, wait_for_device
from planner.workers.place import Place, cores_to_send

_SHORT_BYTES = 64  # so short that only the latency counts
_PROBE_BYTES = 2**16
_PROBE_ROUNDS = 4
_PROBE_PRODUCTS = 8
_PROBE_S = 0.1  # a probe that takes less is repeated with twice as many messages
# a message that takes longer is not repeated: the first few rounds are accurate enough
_SLOW_S = 5.0
_PRODUCT_WIDTH = 512
_UNIT_WIDTH, _UNIT_ROWS = 512, 1024  # of a small network with divided weights
NOTABLE_SPREAD = 2.0  # of all-reduces in different turns; undisturbed ones are within a third
_MEASURED = (*RATES, *WAITS)
_CODECS = [codec for codec in CODECS.values() if codec.element_bytes]
_CODINGS = 10  # of each codec

Pairs = tuple[tuple[int, int], ...]  # of ranks, which exchange messages at the same time


class _Sums(NamedTuple):
    """What all-reduces between computations take."""

    bytes_per_s: float
    latency_s: float  # of a step
    wait_share: float  # of what was computed since the last one
    wait_s: float  # at most


class _Group(NamedTuple):
    """The members of one level that this worker exchanges with."""

    size: int
    turns: Sequence[Pairs]
    ring: dist.ProcessGroup
    sharing: int  # pairs at a time that share a link
    one_ring: dist.ProcessGroup | None = None  # of all workers, where it is another one


def pairs_by_turn(hosts: int, workers: int) -> tuple[list[Pairs], list[Pairs]]:
    """Return the pairs within hosts and those between hosts; the items of each list are measured
    one after the other.

    Args:
        workers: on each host; worker k of host h has rank h * workers + k.
    """
    first = range(0, hosts * workers, workers)
    inner = [tuple((rank + k, rank + k + 1) for rank in first) for k in range(workers - 1)]
    outer = [tuple((rank + k, rank + k + workers) for k in range(workers)) for rank in first[:-1]]
    return inner, outer


class LevelMeasurement:
    """Measures each level of the job's cluster; all workers of the job make it, and call the same
    methods.

    Each number is the slowest rank's, by a maximum over all. So it is the same on every rank, as
    the rounds that follow from it must be. What is measured goes through groups for data; the rest,
    and the order of all, through the default group, which is of gloo.
    """

    def __init__(self, place: Place, timeout: timedelta, effort: Effort) -> None:
        self._device = place.wire
        self._effort = effort
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        if self._world == 1:
            raise InputError(
                "a single worker has no links",
                hint="start at least two: torchrun --nproc-per-node 2 ...",
            )

        self._workers = self._common("LOCAL_WORLD_SIZE")
        self._hosts = self._world // self._workers
        self._inner, self._outer = pairs_by_turn(self._hosts, self._workers)

        groups = DataGroups(place, timeout)
        # By sender and receiver: as in the executor each direction has a connection of its own.
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        for pairs in (*self._inner, *self._outer):
            for one, other in pairs:
                self._groups[one, other] = groups.for_messages(one, other)
                self._groups[other, one] = groups.for_messages(other, one)

        # Every worker makes every group, those that it is not in included.
        self._within: list[dist.ProcessGroup] = []
        if self._workers > 1:
            for first in range(0, self._world, self._workers):
                host = range(first, first + self._workers)
                self._within.append(groups.for_collectives(host))

        self._across: list[dist.ProcessGroup] = []
        if self._hosts > 1:
            for place_on_host in range(self._workers):
                ring = range(place_on_host, self._world, self._workers)
                self._across.append(groups.for_collectives(ring))

        self._one_ring: dist.ProcessGroup | None = None
        if self._hosts > 1 and self._workers > 1:
            self._one_ring = groups.for_collectives(range(self._world))
        groups.use_once()

        # Messages overlap with computation where every host has cores to send with.
        has_spare = place.kind != "cpu" or cores_to_send(self._workers)
        self.overlap = not self._slowest(float(not has_spare))

    def fit(self, budget_s: float) -> float:
        """Send so little that measuring takes about `budget_s`, and return the seconds that it
        will take.

        The size of what is sent follows from a few messages and one computation.
        """
        paces = [self._pace(group) for group in self._level_groups()]
        self._effort, expected_s = fitting_effort(self._effort, paces, budget_s)
        return expected_s

    def levels(self) -> tuple[Level, ...]:
        """Return the levels on rank 0, none elsewhere."""
        groups = self._level_groups()
        turns = [[self._level(group) for group in groups] for _ in range(self._effort.turns)]
        if self._rank != 0:
            return ()
        return tuple(typical_level(measured) for measured in zip(*turns, strict=True))

    def _level_groups(self) -> list[_Group]:
        """Return the members of each level, from the innermost one."""
        groups = []
        if self._workers > 1:
            ring = self._within[self._rank // self._workers]
            groups.append(_Group(self._workers, self._inner, ring, sharing=1))
        if self._hosts > 1:
            ring = self._across[self._rank % self._workers]
            groups.append(_Group(self._hosts, self._outer, ring, self._workers, self._one_ring))
        return groups

    def _pace(self, group: _Group) -> Pace:
        """Return how fast a level is, roughly; its first pairs stand for all."""
        pairs = group.turns[0]
        round_s = self._latency_s(pairs, rounds=3)

        few, many = self._factors(SMALL_SUM_BYTES)
        s_per_byte = self._probed_s_per_byte(pairs)
        products_s = self._median_s(lambda: _multiply(many, few), _PROBE_PRODUCTS)

        unit_s = 0.0
        if self._shards_units(group.ring):
            net = _unit_net(_PROBE_BYTES)
            unit_s = self._median_s(lambda: _run_unit(net), 2)

        one_ring_size = 0
        if group.one_ring is not None:
            one_ring_size = self._world
        return Pace(
            size=group.size,
            turns=len(group.turns),
            s_per_byte=s_per_byte,
            round_s=2 * round_s,  # the others wait for it, which takes as long
            products_s=products_s,
            unit_s_per_byte=unit_s / _PROBE_BYTES,
            one_ring_size=one_ring_size,
        )

    def _probed_s_per_byte(self, pairs: Pairs) -> float:
        """Send ever more until it takes long enough to be timed, and return the seconds per
        byte.
        """
        rounds = 2 * _PROBE_ROUNDS
        seconds, _ = self._stream(pairs, _PROBE_BYTES, rounds)
        while seconds < _PROBE_S:
            rounds *= 2
            seconds, _ = self._stream(pairs, _PROBE_BYTES, rounds)
        return seconds / (rounds * _PROBE_BYTES)

    def _shards_units(self, ring: dist.ProcessGroup) -> bool:
        """Return whether units with divided weights are measured; elsewhere they exchange beside
        computations.
        """
        return self._device.type == "cpu" and over_gloo(ring)

    def codec_times(self) -> tuple[CodecTime, ...]:
        """Return what the codecs take: half of it at each end."""
        keep_freed_pages()  # as the workers do
        times = []
        for codec in _CODECS:
            coded_bytes = codec.size_bytes(self._effort.message_bytes, FLOAT_BYTES)
            s_per_byte = self._coding_s(codec) / (2 * coded_bytes)
            times.append(CodecTime(codec=codec.name, s_per_byte=s_per_byte))
        return tuple(times)

    def _coding_s(self, codec: Codec) -> float:
        """Return the seconds of coding and decoding a message, in all processes at once."""
        value = torch.ones(self._effort.message_bytes // FLOAT_BYTES, device=self._device)
        coding = coding_of(codec, value.nbytes, value.dtype)
        size = codec.size_bytes(value.nbytes, value.itemsize)
        message = torch.empty(size, dtype=torch.uint8, device=self._device)
        place = coding.place(message, 0, value.shape)

        def code() -> None:
            coding.write(place, value)
            coding.read(place, value.dtype, value.shape)

        return self._median_s(code, _CODINGS)

    def _level(self, group: _Group) -> Level:
        """Measure one level."""
        sharing = group.sharing
        latency_s = self._level_latency_s(group)
        bandwidth = min(self._bandwidth(pairs, sharing) for pairs in group.turns)
        reduced_per_s = self._all_reduce(group.ring, group.size)

        one_ring_per_s = None
        if group.one_ring is not None:
            # More than all rings together have is noise.
            measured_per_s = self._all_reduce(group.one_ring, self._world)
            one_ring_per_s = min(measured_per_s, reduced_per_s * sharing)

        sums = self._sums(group.ring, group.size, reduced_per_s)
        level = Level(
            size=group.size,
            bandwidth_bytes_per_s=bandwidth,
            latency_s=latency_s,
            all_reduce_bandwidth_bytes_per_s=reduced_per_s * sharing,
            one_ring_bandwidth_bytes_per_s=one_ring_per_s,
            sum_bandwidth_bytes_per_s=sums.bytes_per_s * sharing,
            sum_latency_s=max(latency_s, sums.latency_s),
            sum_wait_share=sums.wait_share,
            sum_wait_s=sums.wait_s,
            rate_source="measured",
        )
        if not self._shards_units(group.ring):
            return level
        return self._with_units(level, group.ring, sharing, reduced_per_s)

    def _level_latency_s(self, group: _Group) -> float:
        """Return the median latency of a message, of the slowest turn.

        Pairs that share a link would wait for each other, which is no latency: one of them stands
        for all.
        """
        turns = group.turns
        if group.sharing > 1:
            turns = [pairs[:1] for pairs in turns]
        return max(self._latency_s(pairs, self._effort.latency_rounds) for pairs in turns)

    def _latency_s(self, pairs: Pairs, rounds: int) -> float:
        """Return the median latency of a message, of the slowest pair."""
        outgoing, incoming = (
            torch.zeros(_SHORT_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        peer = _peer_of(self._rank, pairs)

        def exchange() -> None:
            if peer is not None:
                for work in self._post(peer, outgoing, incoming):
                    work.wait()

        return self._median_s(exchange, rounds)

    def _bandwidth(self, pairs: Pairs, sharing: int) -> float:
        """Return the bytes per second of the slowest link each way, after a first round that brings
        it up to speed.
        """
        size_bytes = self._effort.message_bytes
        rounds = FIRST_ROUNDS
        all_s, between_s = self._stream(pairs, size_bytes, rounds)
        if between_s < _SLOW_S:
            rounds = max(self._effort.least_rounds, int(self._effort.seconds / between_s))
            all_s, between_s = self._stream(pairs, size_bytes, rounds)

        if sharing == 1:
            return size_bytes / between_s
        # Pairs that share a link do not all get the same part of it, and what one leaves the others
        # take. So for those all bytes count, until the last pair is done.
        return sharing * rounds * size_bytes / all_s

    def _stream(self, pairs: Pairs, size_bytes: int, rounds: int) -> tuple[float, float]:
        """Send messages one after the other, both ways at once.

        Returns:
            Seconds until the last pair is done, and median seconds from message to message of the
            slowest pair.
        """
        peer = _peer_of(self._rank, pairs)
        self._wait_for_all()
        start_s = time.perf_counter()
        all_s = 0.0
        between_s = 0.0
        if peer is not None:
            ends_s = self._arrivals_s(peer, size_bytes, rounds)
            all_s = ends_s[-1] - start_s
            gaps_s = [later - earlier for earlier, later in pairwise(ends_s)]
            between_s = median(gaps_s or [0.0])

        slowest_between_s = self._slowest(between_s)
        return self._slowest(all_s), slowest_between_s

    def _arrivals_s(self, peer: int, size_bytes: int, rounds: int) -> list[float]:
        """Return the time at which each of `rounds` messages of `peer` arrived, while as many
        travel the other way.

        `POSTED` messages are open each way, as in a run, so that the link never rests: after a
        pause TCP speeds up anew, and each time differently.
        """
        outgoing = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
        incoming = [torch.zeros_like(outgoing) for _ in range(POSTED)]
        opened: deque[tuple[dist.Work, dist.Work]] = deque()
        ends_s: list[float] = []
        for number in range(rounds + POSTED):
            if number >= POSTED:
                receive, send = opened.popleft()
                receive.wait()
                # `wait` orders only the stream, not the host. A device-wide wait would include
                # later messages.
                runtime_of(self._device).current_stream(self._device).synchronize()
                ends_s.append(time.perf_counter())
                send.wait()
            if number < rounds:
                opened.append(self._post(peer, outgoing, incoming[number % POSTED]))

        return ends_s

    def _post(
        self, peer: int, outgoing: torch.Tensor, incoming: torch.Tensor
    ) -> tuple[dist.Work, dist.Work]:
        # Each direction is a communicator of its own, made before: neither call waits for the peer,
        # so neither end can keep the other from its second.
        receive = dist.irecv(incoming, src=peer, group=self._groups[peer, self._rank])
        send = dist.isend(outgoing, dst=peer, group=self._groups[self._rank, peer])
        assert receive is not None
        assert send is not None
        return receive, send

    def _all_reduce(self, ring: dist.ProcessGroup, size: int) -> float:
        """Return the bytes that each worker sends per second, 2(r-1)/r per bucket, while all rings
        reduce at once.

        Gradients are copied together and averaged, as in a run: beside the fast links of a host
        that takes long, too.
        """
        bucket = torch.ones(self._effort.bucket_bytes // 4, device=self._device)

        def reduce() -> None:
            flat = torch.empty_like(bucket)
            torch._foreach_copy_([flat], [bucket])
            dist.all_reduce(flat, group=ring)
            flat.div_(size)

        rounds = max(3, int(self._effort.seconds / self._median_s(reduce, 2)))
        return 2 * (size - 1) / size * self._effort.bucket_bytes / self._median_s(reduce, rounds)

    def _sums(self, ring: dist.ProcessGroup, size: int, reduced_per_s: float) -> "_Sums":
        """Return what all-reduces between computations take, by two sizes, and by short and long
        computations.
        """
        small = SMALL_SUM_BYTES
        large = max(2 * small, self._usual_sum_bytes())
        short, long = PRODUCT_PAIRS

        def added_s(size_bytes: int, pairs: int) -> tuple[float, float]:
            rounds = self._effort.sums_in_a_row(size_bytes, reduced_per_s)
            return self._added_s(size_bytes, rounds, pairs, ring)

        short_s, short_gap_s = added_s(small, short)
        long_s, long_gap_s = added_s(small, long)
        large_s, _ = added_s(large, 1)

        # Longer than nothing, unless something disturbed the measurement.
        share = 0.0
        longer_s = long_gap_s - short_gap_s
        if longer_s > 0:
            share = max(0.0, long_s - short_s) / longer_s

        # A disturbed sum may have added less than nothing.
        wait_s = max(0.0, min(share * long_gap_s, long_s))
        ends = (small, long_s - wait_s), (large, large_s - wait_s)
        rate, latency_s = _line(2 * (size - 1), size, *ends, reduced_per_s)
        return _Sums(rate, latency_s, share, wait_s)

    def _usual_sum_bytes(self) -> int:
        """Return the size of a large sum: on CPUs what models exchange, because rates of larger
        ones are better, and say little of those.
        """
        if self._device.type == "cpu":
            return self._effort.sum_bytes
        return self._effort.message_bytes

    def _with_units(
        self, level: Level, ring: dist.ProcessGroup, sharing: int, reduced_per_s: float
    ) -> Level:
        """Return a level with the rates and latencies of what `fully_shard` does for a unit between
        computations, by two sizes.
        """
        from planner.model.tensor.sharded_unit import POSSIBLE  # which takes a second to import

        if not POSSIBLE:
            return level
        effort = self._effort
        most = min(effort.message_bytes // 2, int(effort.seconds_for_sizes * reduced_per_s))
        sizes = (effort.unit_bytes, max(2 * effort.unit_bytes, most))
        taken_s = [self._units_s(ring, size_bytes) for size_bytes in sizes]

        def line(added_s: Sequence[float]) -> tuple[float, float]:
            small, large = zip(sizes, added_s, strict=True)
            rate, latency_s = _line(level.size - 1, level.size, small, large, reduced_per_s)
            return rate * sharing, max(0.0, latency_s)

        scatter = line([kept_s - whole_s for whole_s, kept_s, _ in taken_s])
        gather = line([(gathered_s - kept_s) / 2 for _, kept_s, gathered_s in taken_s])
        return replace(
            level,
            scatter_bandwidth_bytes_per_s=scatter[0],
            scatter_latency_s=scatter[1],
            gather_bandwidth_bytes_per_s=gather[0],
            gather_latency_s=gather[1],
        )

    def _units_s(self, ring: dist.ProcessGroup, size_bytes: int) -> list[float]:
        """Return the seconds of a unit of so many bytes, forward and backward, by what its replicas
        divide.

        That is nothing, gradients, and weights, too, which are gathered twice. They compute as long
        as such units do in training, because an exchange waits for the replica that something has
        disturbed.
        """
        from planner.model.tensor.sharded_unit import divide

        mesh, rows, nets = DeviceMesh.from_group(ring, self._device.type), exchange_over(ring), []
        for divides in ("nothing", "gradients", "weights"):
            net = _unit_net(size_bytes)
            if divides != "nothing":
                again = divides == "weights"
                whole = [divide(each, mesh, rows, shards_weights=again) for each in (*net, net)][-1]
                whole.set_reshard_after_backward(again)
            nets.append(net)

        taken_s = [0.0] * len(nets)
        for turn in range(self._effort.unit_rounds + 1):
            for number, net in enumerate(nets):
                net.zero_grad()
                self._wait_for_all()
                start_s = time.perf_counter()
                _run_unit(net)
                # the first one prepares
                taken_s[number] += (time.perf_counter() - start_s) * (turn > 0)

        return [self._slowest(each / (self._effort.unit_rounds * UNITS)) for each in taken_s]

    def _added_s(
        self, size: int, rounds: int, pairs: int, ring: dist.ProcessGroup
    ) -> tuple[float, float]:
        """Return the seconds that an all-reduce of `size` bytes adds to `pairs` of products before
        it, and of these.

        It waits for the slowest process, and for threads and memory that were at work until then,
        and leaves the sum where the next computation has to fetch it from. Right after another
        all-reduce it is several times as fast.
        """
        few, many = self._factors(size)
        taken_s = {True: 0.0, False: 0.0}
        for sums in (True, False) * self._effort.sum_rounds:
            self._wait_for_all()
            start_s = time.perf_counter()
            for _ in range(rounds):
                for _ in range(pairs):
                    many = _multiply(many, few)
                if sums:
                    dist.all_reduce(many, group=ring)
            wait_for_device(self._device)
            taken_s[sums] += (time.perf_counter() - start_s) / (self._effort.sum_rounds * rounds)

        return self._slowest(taken_s[True] - taken_s[False]), self._slowest(taken_s[False])

    def _factors(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two matrices to multiply, the second of which has `size` bytes.

        Zeros stay zeros, where other numbers would soon be infinite or too small for full speed.
        """
        few = torch.zeros(_PRODUCT_WIDTH, _PRODUCT_WIDTH, device=self._device)
        rows = size // FLOAT_BYTES // _PRODUCT_WIDTH
        return few, torch.zeros(rows, _PRODUCT_WIDTH, device=self._device)

    def _median_s(self, action: Callable[[], object], rounds: int) -> float:
        """Return the median seconds of an action that all processes begin at once, of the slowest
        one.
        """
        times_s = []
        for _ in range(rounds):
            self._wait_for_all()
            start_s = time.perf_counter()
            action()
            wait_for_device(self._device)
            times_s.append(time.perf_counter() - start_s)
        return self._slowest(median(times_s))

    def _wait_for_all(self) -> None:
        """Wait until all processes are here and this one's device is idle."""
        dist.barrier()
        wait_for_device(self._device)

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


def typical_level(turns: Sequence[Level]) -> Level:
    """Return the level of which each turn measured every number: their medians.

    Where the all-reduces of one turn were `NOTABLE_SPREAD` times as fast as those of another, the
    level says between which rates they were.
    """
    medians = {}
    for name in _MEASURED:
        values = [getattr(turn, name) for turn in turns]
        if None not in values:
            medians[name] = median(values)

    reduced = [turn.all_reduce_bandwidth_bytes_per_s or 0.0 for turn in turns]
    slowest = min(reduced)
    fastest = max(reduced)
    between = None
    if fastest > NOTABLE_SPREAD * slowest:
        between = (slowest, fastest)
    return replace(turns[0], **medians, all_reduce_between_bytes_per_s=between)


def _multiply(many: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
    """Return what a pair of products makes of a matrix, of the same shape."""
    return torch.mm(torch.mm(many + many, few), few)


def _unit_net(size_bytes: int) -> nn.Sequential:
    """Return a network of units with weights of `size_bytes` each."""
    inner = max(1, size_bytes // (8 * _UNIT_WIDTH))
    layers = [(nn.Linear(_UNIT_WIDTH, inner), nn.Linear(inner, _UNIT_WIDTH)) for _ in range(UNITS)]
    return nn.Sequential(*(nn.Sequential(*each) for each in layers))


def _run_unit(net: nn.Module) -> None:
    """Run the network's forward and backward."""
    net(torch.ones(_UNIT_ROWS, _UNIT_WIDTH)).sum().backward()


def _line(
    steps: int, size: int, small: tuple[int, float], large: tuple[int, float], otherwise: float
) -> tuple[float, float]:
    """Return bytes per second and the latency of a step, by what two sizes take: bytes, and
    seconds.
    """
    small_bytes, small_s = small
    large_bytes, large_s = large

    # Where something disturbed the measurement so much that the larger one was no slower,
    # gradients' rate counts.
    rate = otherwise
    if large_s > small_s:
        rate = steps / size * (large_bytes - small_bytes) / (large_s - small_s)

    moving_s = steps / size * small_bytes / rate
    return rate, (small_s - moving_s) / steps


def _peer_of(rank: int, pairs: Pairs) -> int | None:
    """Return the rank that `rank` exchanges with; None where it only waits."""
    return next((sum(pair) - rank for pair in pairs if rank in pair), None)
