"""What a process takes of the GPU beside tensors, its kernels loaded lazily and eagerly; and what
communicators take.

Each is measured in processes of its own, for which this module is the program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F

from benchmarks.kept import ROOT
from benchmarks.testbed.two_cores.launch import free_port
from planner.workers.place import GPU_VARIABLES

LOADINGS = {"lazily": "LAZY", "eagerly, as workers do": "EAGER"}
KINDS = ("messages", "sums")
RANKS, EACH, MAX_BLOCKS = 2, 3, 4


@dataclass(frozen=True)
class Row:
    """Bytes of a process beside its tensors: at its start, and after each use of the GPU."""

    start_s: float
    start_bytes: int
    after_bytes: dict[str, int]


@dataclass(frozen=True)
class Communicators:
    """Bytes that each further communicator of two ranks took in each of their processes."""

    each_bytes: list[int]


def measure(show: Callable[[str, Row | Communicators], None]) -> None:
    """Measure both ways to load kernels, then communicators of two ranks that share the GPU."""
    for name, loading in LOADINGS.items():
        environment = {**os.environ, **GPU_VARIABLES, "CUDA_MODULE_LOADING": loading}
        command = [sys.executable, "-m", "benchmarks.on_gpu.context"]
        said = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=300,
        )
        show(f"kernels loaded {name}", Row(**json.loads(said.stdout)))
    for kind in KINDS:
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        start_processes(  # type: ignore[no-untyped-call]
            _make_groups, (kind, free_port(), queue), nprocs=RANKS
        )
        show(f"communicators for {kind}", Communicators(queue.get()))


def _own_context() -> Row:
    began = time.perf_counter()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.ones(1, device="cuda")
    start = _beside_tensors()
    start_s = time.perf_counter() - began
    return Row(start_s, start, {what: _beside_tensors() for what in _uses()})


def _beside_tensors() -> int:
    """Return the GPU's memory in use, by any process, less what this one's allocator has."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _uses() -> Iterator[str]:
    """Use the GPU in one more way at each step, and say in which."""
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    F.gelu(weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    yield "a matrix product and its backward"
    half = weight.detach().bfloat16()
    (half @ half).sum()
    yield "one in bfloat16"
    convolution = torch.nn.Conv2d(64, 64, 3).cuda()
    convolution(torch.randn(8, 64, 32, 32, device="cuda")).sum().backward()
    yield "a convolution"
    query = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    total = F.scaled_dot_product_attention(query, query, query, is_causal=True).sum()
    total.backward()  # type: ignore[no-untyped-call]
    yield "attention"
    torch.optim.AdamW(convolution.parameters()).step()
    yield "AdamW"
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        half @ half
    yield "a matrix product on another stream"


def _make_groups(
    rank: int, kind: str, port: int, queue: multiprocessing.SimpleQueue[list[int]]
) -> None:
    """Make groups and use each once; rank 0 says what each but the first took, which loads NCCL's
    kernels.
    """
    # NCCL refuses a GPU to two ranks of one host
    shared = {"NCCL_HOSTID": f"h{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= {**GPU_VARIABLES, **shared, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    one, taken = torch.ones(1, device="cuda"), [_of_all()]
    for _ in range(1 + EACH):
        options = dist.ProcessGroupNCCL.Options()
        if kind == "messages":
            options.config.max_ctas = MAX_BLOCKS
        group = dist.new_group(list(range(RANKS)), backend="nccl", pg_options=options)
        if kind == "sums":
            dist.all_reduce(one, group=group)
        else:
            work = dist.isend(one, 1, group) if rank == 0 else dist.irecv(one, 0, group)
            assert work is not None
            work.wait()
        taken.append(_of_all())
    if rank == 0:
        queue.put([(after - before) // RANKS for before, after in pairwise(taken[1:])])
    dist.barrier()
    os._exit(0)  # destroying a communicator may wait for the other rank's


def _of_all() -> int:
    """Return the GPU's memory in use while no rank takes or gives back any."""
    torch.cuda.synchronize()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    dist.barrier()
    return total - free


if __name__ == "__main__":
    print(json.dumps(asdict(_own_context())))
