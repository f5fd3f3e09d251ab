"""874 measured runs of nanotron on 8 to 512 H100, and 258 that ran out of memory. See README.md in
this folder.

python -m benchmarks.gpu_truth.nanotron

One rank's part of each kind of block is traced, and a run is priced as the plan of its groups of
ranks, each of which is one device to the planner.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from math import ceil, copysign, log, log2
from statistics import mean, median
from typing import NamedTuple

import numpy as np
from tabulate import tabulate
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu_truth.by_layers import both_ways
from benchmarks.gpu_truth.nanotron_model import Llama as Llama
from benchmarks.gpu_truth.rows import ANCHORS, device, price
from planner.cost.network.link import Link, backward_and_reduce_s, ring_all_reduce_s
from planner.cost.overheads import FRAGMENTED
from planner.formats.cluster import Cluster, Level
from planner.formats.names import PLANNED
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value
from planner.profiler.estimated.devices import HOSTS, DeviceSpec
from planner.profiler.estimated.execution import cuda_operations
from planner.profiler.estimated.operations import Operation
from planner.profiler.estimated.roofline import Costs, Floats
from planner.profiler.step.allocation import saved_bytes

_GIB = 2**30
PER_SERVER = 8
# bytes per second and direction: data sheets of the H100 and of its servers
NVLINK, NICS = 450e9, 8 * 50e9
H100 = device("h100")
KINDS = ("embedding", "layer", "head", "loss")


class Rates(NamedTuple):
    """Bytes per second of collectives of all GPUs of some servers."""

    reduce_bytes_per_s: float
    gather_bytes_per_s: float


@dataclass(frozen=True)
class Run:
    """One configuration, and what was measured of it; `seconds` are those of a minibatch, None out
    of memory.
    """

    billion: float
    llama: Llama  # of one of its ranks
    gpus: int
    replicas: int
    stages: int
    samples: int  # of a microbatch
    microbatches: int  # of each replica
    sharded: bool
    seconds: float | None
    reserved_bytes: float | None
    # of collectives of all its GPUs, as its job measured them; None out of memory
    rates: Rates | None
    near_reduce_bytes_per_s: float | None  # the same of an all-reduce within a server
    checked: bool  # every rank of a group says what it is about to do before each collective

    @property
    def servers(self) -> int:
        """Of the job."""
        return max(1, self.gpus // PER_SERVER)

    @property
    def minibatch(self) -> int:
        """Samples."""
        return self.replicas * self.samples * self.microbatches

    @property
    def job(self) -> tuple[float, int]:
        """Model and number of GPUs."""
        return self.billion, self.gpus


def runs() -> Iterator[Run]:
    """Yield all rows of the file."""
    with (ANCHORS / "nanotron-h100-develop.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            number = {
                name: int(row[name])
                for name in ("gpus", "dp", "tp", "pp", "microbatch", "microbatches")
            }
            sizes = (
                int(row[name])
                for name in ("layers", "hidden", "heads", "ffn", "vocabulary", "sequence", "tp")
            )
            llama = Llama(*sizes)
            trained = row["outcome"] == "trained"
            rates = (
                Rates(float(row["allreduce_GBps"]) * 1e9, float(row["allgather_GBps"]) * 1e9)
                if trained
                else None
            )
            tokens = number["dp"] * number["microbatch"] * number["microbatches"] * llama.seq
            speed = float(row["tokens_per_s_per_gpu"]) * number["gpus"] if trained else 0.0
            yield Run(
                float(row["parameters_billion"]),
                llama,
                number["gpus"],
                number["dp"],
                number["pp"],
                number["microbatch"],
                number["microbatches"],
                row["zero"] == "1",
                tokens / speed if trained else None,
                float(row["peak_reserved_GB"]) * _GIB if trained else None,
                rates,
                float(row["allreduce_intra_GBps"]) * 1e9 if trained else None,
                rates is not None and is_checked(number["gpus"], rates),
            )


def is_checked(gpus: int, rates: Rates) -> bool:
    """Return whether a job on several servers checked its collectives, given the rates that it
    measured.

    Its all-gathers of 1 GiB take 3 ms and 40 us per rank without checks, and 0.3 ms per rank more
    with them.
    """
    gathered_s = (1 - 1 / gpus) * 2**30 / rates.gather_bytes_per_s
    return gpus > PER_SERVER and gathered_s > 3e-3 + 0.16e-3 * gpus


@dataclass(frozen=True)
class Block:
    """What a block does on one rank, forward and backward, and what it keeps."""

    forward: Costs
    backward: Costs
    saved_bytes: int
    workspace_bytes: int
    sizes: tuple[int, ...]  # elements of each weight

    @property
    def weights(self) -> int:
        """Number of tensors."""
        return len(self.sizes)

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(self.sizes)


@cache
def block_of(llama: Llama, kind: str, samples: int) -> Block:
    """Trace a block without data."""
    with FakeTensorMode(), cuda_operations():
        module, x = replace(llama, layers=1).blocks(samples)[kind]
        (saved,) = saved_bytes([module], lambda _: module(x))
        recorder = both_ways(module, x)
        weights = list(module.parameters())
    start, middle, end = recorder.until
    _, forward, backward = recorder.allocated.peaks[:3]
    gradients = sum(weight.nbytes for weight in weights)
    return Block(
        Costs(recorder.operations[start:middle]),
        Costs(recorder.operations[middle:end]),
        saved,
        max(0, forward - saved, backward - saved - gradients),
        tuple(weight.numel() for weight in reversed(weights)),
    )


def stages_of(llama: Llama, count: int) -> list[list[str]]:
    """Return the blocks of each stage, as nanotron balances layers and head (`models/base.py`,
    `models/llama.py`).

    The loss is computed with the head. In the code a head that fills a stage leaves the loss to the
    next one, and sends it the logits: 1 GB per sample, 21 ms through a server's network. Deep
    pipelines took equally long across servers and within them, and as long as head and loss
    together.
    """
    h = llama.hidden
    costs = {"layer": 4 * h * h + 3 * llama.ffn * h, "head": llama.vocab * h}
    blocks = ["embedding", *["layer"] * llama.layers, "norm", "head"]
    total = llama.layers * costs["layer"] + costs["head"]
    stages: list[list[str]] = [[] for _ in range(count)]
    number, done = 0, 0
    for block in blocks:
        if block != "norm":  # it has the stage of the head here
            stages[number].append(block)
        done += costs.get(block, 0)
        if done > total * ((number + 1) / count):
            number += 1
    stages = [stage for stage in stages if stage]
    stages[-1].append("loss")
    return stages


@dataclass(frozen=True)
class Links:
    """What collectives and messages of a job reach.

    Attributes:
        rates: of collectives over all GPUs of so many servers.
        step_s: of a ring across servers.
        message_s: of one tensor to the next stage, with the two messages that announce its shape.
    """

    rates: Mapping[int, Rates]
    step_s: float
    message_s: float

    def ring(self, ranks: int, per_server: int) -> Link:
        """Return the link of a ring of so many ranks, of which each server has so many."""
        if ranks <= per_server:
            nearest = min((size for size in _INSIDE if size >= ranks), default=PER_SERVER)
            return Link(*_INSIDE[nearest])
        # The rate is that of 1 GiB, over all ranks of the servers and with their steps.
        servers = ranks // per_server
        steps = servers * PER_SERVER - 1
        moved = 2**30 * steps / (servers * PER_SERVER)
        rate = moved / max(
            moved / NICS, moved / self._of(servers).gather_bytes_per_s - steps * self.step_s
        )
        return Link(rate * per_server / PER_SERVER, self.step_s)

    def gather_s(self, size_bytes: float, ranks: int, per_server: int) -> float:
        """Return the seconds of an all-gather or a reduce-scatter."""
        return float(ring_all_reduce_s(size_bytes, ranks, self.ring(ranks, per_server))) / 2

    def reduce_s(self, size_bytes: float, ranks: int, per_server: int, count: int = 1) -> float:
        """Return the seconds of so many all-reduces of so many bytes in all, across servers by
        trees.

        NCCL takes 2 ((ranks of a server - 1) near + log2(servers) far) for a small one
        (`src/graph/tuning.cc`), given what a hop takes within a server and between two. Of eight
        steps of a ring, one goes to another server.
        """
        if ranks <= per_server:
            return count * float(
                ring_all_reduce_s(size_bytes / count, ranks, self.ring(ranks, per_server))
            )
        servers, near_s = ranks // per_server, _INSIDE[PER_SERVER][1]
        hops_s = (per_server - 1) * near_s + log2(servers) * (
            PER_SERVER * self.step_s - (PER_SERVER - 1) * near_s
        )
        rate = self._of(servers).reduce_bytes_per_s * per_server / PER_SERVER
        return count * 2 * hops_s + 2 * (ranks - 1) / ranks * size_bytes / rate

    def _of(self, servers: int) -> Rates:
        """Return the rates of the nearest number of servers."""
        return self.rates[min(self.rates, key=lambda known: abs(log(known / servers)))]


class Program(NamedTuple):
    """What a host spends, and how far apart servers are."""

    launch_s: float
    collective_s: float
    # of one tensor to the next stage, with the two messages that announce its shape
    message_s: float
    # of a collective whose ranks are checked first, per rank of its group, within a server
    check_s: float
    check_far_s: float  # the same across servers
    step_s: float  # of a ring across servers


def _product_s(spec: DeviceSpec, m: int, n: int, k: int) -> float:
    moved = 2.0 * (m * k + k * n + m * n)
    operation = Operation("gemm", 2.0 * m * n * k, moved, "bfloat16", product=(1, m, n, k))
    return float(Costs([operation]).seconds(spec)[0])


def _beside(collective_s: float, product_s: float) -> float:
    """Return the seconds that a collective adds to a product, whose processors it takes while both
    run.
    """
    return max(0.0, collective_s - product_s) + _CHANNELS / (132 - _CHANNELS) * min(
        collective_s, product_s
    )


def exposed_s(run: Run, kind: str, spec: DeviceSpec, links: Links) -> tuple[float, float]:
    """Return the seconds of collectives that nothing hides, forward and backward.

    A column's all-gather overlaps with the product of the rank's own tokens, and so does the one of
    a row's backward. In its backward a column gathers its tokens again beside the gradient of its
    input, and scatters that beside the gradient of its weight. The forward of a row hides nothing,
    and neither does the loss, which reduces the largest logits, those of the targets, and the
    exponentials over all ranks.
    """
    llama, t = run.llama, run.llama.tensor
    if t == 1:
        return 0.0, 0.0
    rows, h = llama.seq * run.samples, llama.hidden
    if kind == "loss":
        return links.reduce_s(3 * 4.0 * rows, t, PER_SERVER, 3), 0.0
    each_s = links.gather_s(2.0 * rows * h, t, PER_SERVER)
    if kind == "embedding":
        return each_s, each_s
    columns = [llama.vocab // t] if kind == "head" else [3 * h // t, 2 * llama.ffn // t]
    row_widths = [] if kind == "head" else [h // t, llama.ffn // t]
    forward_s = backward_s = 0.0
    for width in columns:
        forward_s += _beside(each_s, _product_s(spec, rows // t, width, h))
        backward_s += _beside(each_s, _product_s(spec, rows, h, width))
        backward_s += _beside(each_s, _product_s(spec, width, h, rows))
    for width in row_widths:
        forward_s += each_s
        backward_s += _beside(each_s, _product_s(spec, rows // t, width, h))
    return forward_s, backward_s


def times_of(
    run: Run, kind: str, spec: DeviceSpec, program: Program, links: Links
) -> tuple[Floats, Floats]:
    """Return the seconds of a block's forward and backward on the device, and on its host."""
    block = block_of(run.llama, kind, run.samples)
    device = np.array([block.forward.seconds(spec).sum(), block.backward.seconds(spec).sum()])
    launches_s = launches_of(run, kind) * program.launch_s + _TRITON.get(kind, 0) * _TRITON_S
    each_s = program.collective_s + _check_s(run, run.llama.tensor, program)
    return device + exposed_s(run, kind, spec, links), launches_s + collectives_of(
        run, kind
    ) * each_s


def collectives_of(run: Run, kind: str) -> Floats:
    """Return how many collectives a block's forward and backward have in a group of ranks."""
    return np.array(_COLLECTIVES[kind]) * float(run.llama.tensor > 1)


def launches_of(run: Run, kind: str) -> Floats:
    """Return the launches of a block's forward and backward, without its collectives."""
    block = block_of(run.llama, kind, run.samples)
    layer = kind == "layer" and run.llama.tensor > 1
    forward, backward = (
        _LAYER_LAUNCHES if layer else (block.forward.launches.sum(), block.backward.launches.sum())
    )
    # each weight's gradient is added in a launch of its own
    return np.array([forward, backward + block.weights])


def layer_of(run: Run, kind: str, number: int, seconds: Floats, spec: DeviceSpec) -> Layer:
    """Return a block of one rank as a layer, given the seconds of its forward and its backward."""
    llama, block = run.llama, block_of(run.llama, kind, run.samples)
    hidden_bytes, logit_bytes = (
        2 * llama.seq * run.samples * n // llama.tensor for n in (llama.hidden, llama.vocab)
    )
    sent = {"loss": 0, "head": logit_bytes}.get(kind, hidden_bytes)
    tied = kind == "head" and run.stages == 1
    own = 0 if tied else block.parameters
    share = own / run.replicas if run.sharded else own
    updates_per_s = spec.bandwidth_bytes_per_s * spec.achieved_bandwidth["update"]
    name = f"{kind}.{number}"
    return Layer(
        name=name,
        op=kind,
        forward_s=float(seconds[0]),
        backward_s=float(seconds[1]) + 10 * own / updates_per_s,
        # Clipping reads and scales all gradients, which are zeroed at the end.
        update_s=(34 * share + 16 * own) / updates_per_s,
        outputs=(Value(name=name, output_bytes=sent, gradient_bytes=sent),) if sent else (),
        weight_bytes=2 * own,
        # Those in half precision, each of which is added to the sum in float32, which always
        # exists.
        gradient_bytes=2 * own,
        buffer_bytes=4 * own,
        optimizer_bytes=ceil(12 * share),
        saved_bytes=block.saved_bytes,
        # The logits in half precision live as long as the model's forward.
        workspace_bytes=block.workspace_bytes + (logit_bytes if kind == "loss" else 0),
    )


def profile_of(layers: Sequence[Layer], samples: int, spec: DeviceSpec) -> Profile:
    """Return the profile of layers in a row."""
    return Profile(
        model="llama",
        graph_hash="nanotron",  # made up: there is no graph
        device=Device(kind="cuda", name=spec.name, memory_bytes=spec.memory_bytes),
        optimizer_elementwise=True,
        microbatch_size=samples,
        layers=tuple(layers),
        edges=tuple(Edge(source=a.name, value=a.name, target=b.name) for a, b in pairwise(layers)),
        provenance=Provenance(tool="benchmarks.gpu_truth", source="estimated"),
    )


class Predicted(NamedTuple):
    """What is predicted of a run: seconds of a minibatch, and bytes that its fullest GPU needs."""

    seconds: float
    needed_bytes: int
    reserved_bytes: int  # by PyTorch's allocator on rank 0, which is of the first stage and logs


def predict(run: Run, spec: DeviceSpec, program: Program, links: Links) -> Predicted:
    """Return a run's speed and memory.

    Replicas are alike, so one of them is priced, and the all-reduce of its gradients is added as
    the cost model says.
    """
    t, llama = run.llama.tensor, run.llama
    stages = stages_of(llama, run.stages)
    layers: list[Layer] = []
    known = {kind: times_of(run, kind, spec, program, links) for kind in KINDS}
    hosts_s = list[float]()
    for blocks in stages:
        device, host = (np.sum([known[kind][part] for kind in blocks], axis=0) for part in (0, 1))
        hosts_s.append(float(host[1]))
        factor = np.maximum(1.0, host / np.maximum(device, 1e-12))
        for kind in blocks:
            layers.append(layer_of(run, kind, len(layers), known[kind][0] * factor, spec))
    profile = profile_of(layers, run.samples, spec)
    names = iter(layer.name for layer in layers)
    own_stages = [OwnStage(layers=tuple(next(names) for _ in blocks)) for blocks in stages]
    plan = price(profile, _groups(run, len(stages), links), own_stages, run.microbatches)
    ends_s = [
        synchronize_s(run, blocks, stage.backward_s, host_s, program, links)
        for stage, blocks, host_s in zip(plan.stages, stages, hosts_s, strict=True)
    ]
    all_tokens_bytes = 2 * llama.seq * run.samples * llama.hidden * (t > 1)
    buffers = 2 * all_tokens_bytes  # into which columns and rows gather
    needed = [
        plan.memory_bytes(number) + buffers + round(pending(run, blocks, number) * all_tokens_bytes)
        for number, blocks in enumerate(stages)
    ]
    tensors = (plan.tensor_bytes(0) + buffers) * (1 + FRAGMENTED)
    assert spec.memory_bytes is not None
    # Where memory ends, PyTorch waits for the device instead.
    reserved = min(
        tensors + pending(run, stages[0], 0) * all_tokens_bytes, max(tensors, spec.memory_bytes)
    )
    seconds = plan.predicted.seconds_per_minibatch + max(ends_s)
    return Predicted(seconds, max(needed), round(reserved))


def pending(run: Run, blocks: Sequence[str], number: int) -> float:
    """Return the tensors of all tokens that a stage's host has freed, and its device has not yet
    scattered.

    Each layer scatters two forward and two backward. PyTorch gives their memory out again only when
    the collective's stream has passed them. A host that waits for no checks is ahead by the
    launches that CUDA queues; what a backward scatters takes the place of what it frees, until the
    next forward needs that. In the first step the device of the first stage waits to hand its
    second microbatch to a stage whose host still compiles and loads kernels for the first, while
    its own host, which receives nothing, launches all forwards before its first backward.

    Args:
        run, blocks, number: the run, and what a stage has, and which it is.
    """
    forward = 2 * blocks.count("layer") + ("embedding" in blocks)
    warm_up = max(0, min(run.stages - 1, run.microbatches) - 1) * forward * (number == 0)
    if run.checked:
        return warm_up
    launches = sum(
        float((launches_of(run, kind) + collectives_of(run, kind)).sum()) for kind in blocks
    )
    ahead = min(1.0, _QUEUED / launches) * (2 * forward + ("head" in blocks))
    return max(warm_up, ahead if run.microbatches > 1 else min(ahead, forward))


def synchronize_s(
    run: Run,
    blocks: Sequence[str],
    backward_s: float,
    host_s: float,
    program: Program,
    links: Links,
) -> float:
    """Return the seconds that follow the last backward of a stage, beside its update.

    DistributedDataParallel reduces buckets of gradients beside the backward; their checks hold its
    host up. With a divided optimizer nanotron does not use it, and reduces all gradients at once,
    in float32, after the last backward (`trainer.py`: `make_ddp`). Then the norms' gradients are
    summed over the ranks that divide layers, the embedding's with those of a tied head on another
    stage, the norm of all over the ranks of a replica, and on the last stage the loss over
    replicas. All ranks wait for each other at the end of the step, whose time is logged. The device
    goes on while its host waits for a check. What the host launches and the device are taken to
    follow each other here: of 1.34 billion parameters that is nearer than the longer of the two,
    and of 3.57 billion, too.

    Args:
        run, blocks: the run, and what the stage has.
        backward_s: of the stage.
        host_s: of the stage's host, in a backward.
        program, links: as in `predict`.
    """
    llama, t, r = run.llama, run.llama.tensor, run.replicas
    # one stage has one matrix for both
    own = [kind for kind in reversed(blocks) if kind != "head" or run.stages > 1]
    sizes = [size for kind in own for size in block_of(llama, kind, run.samples).sizes]
    near, longer_s, device_s = max(1, PER_SERVER // t), 0.0, 0.0
    launches_s, checked = 5 * len(sizes) * program.launch_s, [run.gpus, t * run.stages, t]
    checked += [r] * ("loss" in blocks)
    if r > 1 and run.sharded:
        # of weights
        device_s += links.reduce_s(4 * sum(sizes), r, near) + links.gather_s(
            2 * sum(sizes), r, near
        )
        launches_s += r * len(sizes) * _COPY_S
        checked += [r, r]
    elif r > 1:
        longer_s = max(backward_s, host_s + buckets(sizes) * _check_s(run, r, program))
        # Ranks that divide layers across servers need the links for that as long as the backward
        # takes.
        link = replace(links.ring(r, near), overlap=t <= PER_SERVER)
        reduce_s = links.reduce_s(4 * sum(sizes), r, near, buckets(sizes))
        longer_s = float(backward_and_reduce_s(longer_s, reduce_s, link)) - backward_s
    if run.stages > 1 and {"embedding", "head"} & set(blocks):
        device_s += (
            4
            * llama.vocab
            * llama.hidden
            / t
            / (NVLINK if r * t < PER_SERVER else NICS / PER_SERVER)
        )
        checked.append(2)
    if t > 1:
        norms = [llama.hidden for kind in own for _ in range(_NORMS.get(kind, 0))]
        device_s += links.reduce_s(4 * sum(norms) + 4, t, PER_SERVER, len(norms) + 1)
    return (
        longer_s
        + launches_s
        + max(device_s, sum(_check_s(run, ranks, program) for ranks in checked))
    )


def _check_s(run: Run, ranks: int, program: Program) -> float:
    """Return the seconds of the check before a collective of so many ranks."""
    near = ranks == run.llama.tensor <= PER_SERVER or run.gpus <= PER_SERVER
    return (
        run.checked * ranks * (program.check_s if near else program.check_far_s)
        if ranks > 1
        else 0.0
    )


def _groups(run: Run, stages: int, links: Links) -> Cluster:
    """Return the cluster of the groups of ranks of one replica, whose stages are as far apart as
    theirs.
    """
    t = run.llama.tensor
    near = run.replicas * t < PER_SERVER
    rate = NVLINK if near else NICS / PER_SERVER
    return Cluster(
        levels=(
            Level(
                size=stages, bandwidth_bytes_per_s=rate, latency_s=0.0 if near else links.message_s
            ),
        )
    )


@dataclass(frozen=True)
class Judged:
    """A run with its prediction."""

    run: Run
    predicted: Predicted

    @property
    def seconds(self) -> float:
        """Predicted, of a sample: a few runs of a job have another minibatch than the others."""
        return self.predicted.seconds / self.run.minibatch

    @property
    def measured_s(self) -> float:
        """Seconds of a sample of a run that trained."""
        assert self.run.seconds is not None
        return self.run.seconds / self.run.minibatch

    @property
    def error(self) -> float:
        """Predicted over measured speed, minus 1."""
        return self.measured_s / self.seconds - 1


# Rings in a server, by ranks: bytes per second, and seconds of a step, of all-gathers and
# reduce-scatters of 16 to 64 MB (NCCL 2.27 on H100, aiconfigurator).
_INSIDE = {2: (260e9, 20e-6), 4: (318e9, 9e-6), 8: (336e9, 5e-6)}
_CHANNELS = 24  # processors of an H100 that NCCL's rings take within a server: an assumption
# Kernels in Triton each way: norms, and the rotary embedding of queries and of keys. Launching one
# with many arguments takes 62 us with PyTorch 2.2 (triton-lang/triton, pull request 3503), 57 more
# than a launch from C++.
_TRITON, _TRITON_S = {"layer": 4, "head": 1}, 57e-6
# Host's work of a layer that ranks divide, forward and backward, in launches: 2.98 and 1.87 times
# what the transformer block takes that was timed on the H200's server, whose launches are 10.2 and
# 23, less 4 and 6 collectives. The ratio was measured on an EPYC (Zen 5) with torch 2.13, with
# nanotron's own functions over a group that sends nothing.
_LAYER_LAUNCHES = (30.3 - 4, 43.0 - 6)
# forward, and backward
_COLLECTIVES = {"embedding": (1, 1), "layer": (4, 6), "head": (1, 2), "loss": (3, 0)}
_NORMS = {"layer": 2, "head": 1}
_QUEUED = 1024  # launches that a host can be ahead
# A slice, a view and a copy in Python's loop over ranks and weights: 3 us without the copy,
# measured on an EPYC (Zen 5) with torch 2.13, and the copy's launch.
_COPY_S = 3e-6 + HOSTS["fused"]
# Of an eager host that runs in bfloat16 (README, the H200): a collective is launched like any
# kernel, and so are three messages and their tensor. Checks, and steps of rings across servers, are
# those of the all-reduces and all-gathers that measured the jobs' rates.
_EAGER_S = 44e-6
EAGER = Program(_EAGER_S, _EAGER_S, 4 * _EAGER_S, 0.2e-3, 0.29e-3, 40e-6)
_TRIED = {
    "launch_s": (25e-6, 38e-6, 50e-6, 65e-6, 80e-6),
    "collective_s": (40e-6, 80e-6, 120e-6, 160e-6, 200e-6, 250e-6, 300e-6),
    "message_s": (150e-6, 500e-6, 1e-3, 2e-3),
    "check_s": (150e-6, 180e-6, 210e-6, 240e-6, 270e-6, 300e-6, 333e-6),
    "check_far_s": (200e-6, 230e-6, 260e-6, 290e-6, 333e-6),
    "step_s": (25e-6, 30e-6, 35e-6, 40e-6, 45e-6, 50e-6, 60e-6),
}
_ROUNDS = 2
_EACH = 8  # of the runs, one so many is fitted
_BUCKET_BYTES = 50 * 2**20  # of float32: DistributedDataParallel's 25 MiB in half precision


def buckets(sizes: Sequence[int]) -> int:
    """Return the number of buckets of gradients in half precision: one is full at 25 MiB, and has
    whole weights.
    """
    count, held = 0, 0
    for size in sizes:
        held += 2 * size
        if held >= _BUCKET_BYTES / 2:
            count, held = count + 1, 0
    return count + (held > 0)


def links_of(run: Run, program: Program) -> Links:
    """Return the links of a run, as its job measured them; rows out of memory, whose speed nobody
    asks, get any.
    """
    own = {} if run.rates is None or run.checked else {run.servers: run.rates}
    return Links({**usual_rates(), **own}, program.step_s, program.message_s)


@cache
def usual_rates() -> Mapping[int, Rates]:
    """Return the medians of what jobs measured that check nothing, by their servers."""
    measured = [run for run in runs() if run.rates is not None and not run.checked]
    return {
        servers: Rates(
            *(
                median(each)
                for each in zip(*(r.rates for r in measured if r.servers == servers), strict=True)
            )
        )
        for servers in {run.servers for run in measured}
    }


def judge(spec: DeviceSpec, chosen: Sequence[Run], program: Program) -> list[Judged]:
    """Price runs."""
    return [Judged(run, predict(run, spec, program, links_of(run, program))) for run in chosen]


def calibrated(spec: DeviceSpec, chosen: Sequence[Run]) -> Program:
    """Return the host and links that fit a part of these runs best, found one figure at a time.

    The loss is the mean absolute logarithm of predicted over measured seconds, of which a run
    counts half at most: some took ten times as long as others like them.
    """
    part = [run for run in chosen if run.seconds is not None][::_EACH]

    def loss(program: Program) -> float:
        return mean(
            min(0.5, abs(log(each.seconds / each.measured_s)))
            for each in judge(spec, part, program)
        )

    best, least = EAGER, loss(EAGER)
    for _ in range(_ROUNDS):
        for name, values in _TRIED.items():
            for value in values:
                if (found := loss(tried := best._replace(**{name: value}))) < least:
                    best, least = tried, found
    return best


def summary(judged: Sequence[Judged], spec: DeviceSpec) -> tuple[list[list[str]], dict[str, float]]:
    """Return a line per job, and what all jobs say."""
    trained = [each for each in judged if each.run.seconds is not None]
    lines = list[list[str]]()
    errors, taus, regrets = list[float](), list[float](), list[float]()
    for job in sorted({each.run.job for each in trained}):
        own = [each for each in trained if each.run.job == job]
        error = median(abs(each.error) for each in own)
        pairs = list(combinations(own, 2))
        tau = mean(
            copysign(1, (a.measured_s - b.measured_s) * (a.seconds - b.seconds)) for a, b in pairs
        )
        best = min(own, key=lambda each: each.seconds)
        regret = best.measured_s / min(each.measured_s for each in own) - 1
        errors, taus, regrets = [*errors, error], [*taus, tau], [*regrets, regret]
        bias = median(each.error for each in own)
        lines.append(
            [
                *map(str, job),
                str(len(own)),
                f"{error:.1%}",
                f"{bias:+.1%}",
                f"{tau:.2f}",
                f"{regret:+.1%}",
            ]
        )
    assert spec.memory_bytes is not None
    usable_bytes = PLANNED * spec.memory_bytes  # as `plan fit` plans
    fit = [each.predicted.needed_bytes <= usable_bytes for each in trained]
    over = [
        each.predicted.needed_bytes > usable_bytes for each in judged if each.run.seconds is None
    ]
    found = {
        "rows": float(len(trained)),
        "median": median(abs(each.error) for each in trained),
        "worst_job": max(errors),
        "tau": mean(taus),
        "least_tau": min(taus),
        "regret": mean(regrets),
        "worst_regret": max(regrets),
        "memory": mean(
            abs(each.predicted.reserved_bytes / (each.run.reserved_bytes or 1) - 1)
            for each in trained
        ),
        "trained_fit": mean(fit),
        "out_of_memory": mean(over) if over else 1.0,
    }
    return lines, found


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=1, help="only every so-manyth row")
    parser.add_argument(
        "--calibrated", action="store_true", help="fit the host to the other model's runs, too"
    )
    arguments = parser.parse_args()
    spec, everything = H100, list(runs())[:: arguments.each]
    _show(judge(spec, everything, EAGER), spec)
    if arguments.calibrated:
        for billion in sorted({run.billion for run in everything}):
            host = calibrated(spec, [run for run in everything if run.billion != billion])
            print(
                f"\n{billion} billion parameters, with the host that fits the other model: {host}\n"
            )
            print(
                "`fit_device.fit_times` would decline: one other model cannot say whether such a "
                "fit helps.\n"
            )
            _show(judge(spec, [run for run in everything if run.billion == billion], host), spec)


def _show(judged: Sequence[Judged], spec: DeviceSpec) -> None:
    lines, found = summary(judged, spec)
    headers = ["billion", "GPUs", "rows", "median error", "bias", "tau", "regret"]
    print(tabulate(lines, headers=headers, tablefmt="pipe", disable_numparse=True))
    print(", ".join(f"{name} {value:.3g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
