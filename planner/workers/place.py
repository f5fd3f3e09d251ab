"""Where a worker computes and sends from: one rule, which every worker applies to what all of them said of themselves.

NCCL sends from a GPU and needs one for each worker: ncclCommInitRank refuses two ranks on one device.
gloo sends from the CPU, so that several workers may share a GPU; that is slower and never chosen unasked.

CUDA and NCCL read environment variables at their start. A pipeline needs other values than their defaults:

CUDA_DEVICE_MAX_CONNECTIONS: hardware queues of a GPU, 8 unless set, 32 at most. A worker has a stream for computation,
one for each communicator and one for receives. Streams that share a queue wait for each other's launches: a send whose
peer is not ready would hold back the receive behind it, and the peer may be waiting for that very worker.

GPU_MAX_HW_QUEUES: the same for GPUs of ROCm, which do not know the former; 4 unless set.

CUDA_MODULE_LOADING: with EAGER CUDA loads all kernels when it starts. Otherwise it loads each at its first use, which
may wait for the whole device, and so for a message that waits for this worker. It takes some seconds and hundreds of
megabytes, which a profile counts where it is measured with the same setting.

NCCL_RUNTIME_CONNECT: with 0 NCCL makes all connections of a communicator when it is made. Otherwise it makes those of
an algorithm (a ring, a tree) at the first all-reduce of a size for which it chooses that algorithm: in the middle of
training, where it allocates memory and waits for the other members.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args
from zlib import crc32

import torch
import torch.distributed as dist
from pydantic import Field

from planner.errors import InputError
from planner.formats.files import Record
from planner.formats.names import Backend, DeviceType
from planner.runtime import kinds_here, runtime_of
from planner.workers.interfaces import address_towards

GPU_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "GPU_MAX_HW_QUEUES": "32",
    "CUDA_MODULE_LOADING": "EAGER",
    "NCCL_RUNTIME_CONNECT": "0",
}


def set_gpu_variables() -> None:
    """Set those that the user has not set, for this process; before anything is done on a GPU in it."""
    for name, value in GPU_VARIABLES.items():
        os.environ.setdefault(name, value)


class Gpu(Record):
    """A GPU that a worker sees."""

    uuid: str  # the same in every process that sees this GPU
    name: str
    board: str | None = None  # where it sits in its host, if PyTorch tells: slices of one GPU have one place


class Seat(Record):
    """A worker, and what it would use."""

    rank: int
    host: str
    server: int  # number of the host, or of the part of it that one torchrun serves
    gpus: tuple[Gpu, ...]  # that it sees, in the order of its indices
    kind: DeviceType = "cuda"  # of these
    address: str | None = None  # that it sends from to worker 0's host
    same: Mapping[str, str] = Field(default_factory=dict)  # what must be the same for all workers, by what it is


def own_seat(same: Mapping[str, str] | None = None, device: DeviceType | None = None) -> Seat:
    """Describe this worker, in the environment that torchrun sets, and the GPUs of the kind `device` that it sees."""
    host = socket.gethostname()
    kind = device if device not in (None, "cpu") else kind_here()
    return Seat(
        rank=int(os.environ["RANK"]),
        host=host,
        server=int(os.environ.get("GROUP_RANK", crc32(host.encode()))),
        gpus=visible_gpus(kind),
        kind=kind,
        address=address_towards(os.environ["MASTER_ADDR"]) if "MASTER_ADDR" in os.environ else None,
        same=same or {},
    )


def visible_gpus(kind: DeviceType) -> tuple[Gpu, ...]:
    """Return the devices of a kind that this process sees, none of the kind "cpu"; makes no context on them."""
    if kind == "cpu":
        return ()
    seen = [torch.device(kind, index) for index in range(runtime_of(kind).count())]
    return tuple(_described(runtime_of(kind).properties(device), device) for device in seen)


def _described(properties: Any, device: torch.device) -> Gpu:
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return Gpu(
        # Without one, a device is told apart by its index, which holds where all processes see the same devices.
        uuid=str(getattr(properties, "uuid", f"{socket.gethostname()} {device}")),
        name=properties.name,
        board=None if None in place else ":".join(f"{part:02x}" for part in place),
    )


def names_of(seats: Sequence[Seat]) -> str:
    """Name workers and their hosts: "worker 2 (host b) and worker 3 (host b)"."""
    shown = [f"worker {seat.rank} ({seat.host})" for seat in seats[:4]]
    if len(seats) > 4:
        shown.append(f"{len(seats) - 4} more")
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else shown[0]


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_to_send(workers: int) -> bool:
    """Return whether this host has a core to send with, beside the one that each of its workers computes on.

    gloo's threads move the bytes. Without such cores they take those that compute, and nothing overlaps.
    """
    return available_cores() >= 2 * workers


@dataclass(frozen=True)
class Place:
    """The device that a worker computes on, and the one that its messages are made on.

    NCCL sends from the GPU, gloo from the CPU. Kinds of GPU for which PyTorch has neither NCCL nor its like use gloo.
    """

    compute: torch.device
    wire: torch.device

    @property
    def kind(self) -> str:
        """The kind of device that computes, as PyTorch calls it."""
        return self.compute.type

    @property
    def device_name(self) -> str | None:
        """The name of the GPU, if there is one."""
        return runtime_of(self.compute).name(self.compute)

    @property
    def backend(self) -> Backend:
        """The backend of the groups that carry data."""
        return cast("Backend", runtime_of(self.wire).backend)


CPU = Place(torch.device("cpu"), torch.device("cpu"))


def kind_here() -> DeviceType:
    """Return the kind of device to use where nobody says which: that of GPUs if PyTorch sees any, else "cpu"."""
    return kinds_here()[0]


def gpus_here() -> int:
    """Return how many GPUs PyTorch sees."""
    return 0 if (kind := kind_here()) == "cpu" else runtime_of(kind).count()


def choose_place(seats: Sequence[Seat], rank: int, device: DeviceType | None, backend: Backend | None) -> Place:
    """Choose the place of worker `rank`; all workers choose alike, because they decide by the same seats.

    Args:
        seats: what all workers said, by rank.
        device: the kind; None for GPUs where there are any.
        backend: None for the kind's own between GPUs, such as NCCL, and gloo between CPUs.

    Raises:
        InputError: when some workers see no GPU, or when NCCL would have to serve several workers on one.
    """
    if device is None:
        device = next((seat.kind for seat in seats if seat.gpus), "cpu")
    check_backend(device, backend)
    if device == "cpu":
        return CPU
    without = [seat for seat in seats if not seat.gpus or seat.kind != device]
    if without:
        others = "" if len(without) == len(seats) else ", but others do"
        raise InputError(
            f"PyTorch sees no GPU in {names_of(without)}{others}",
            hint=f"is PyTorch there built for {device}, and is CUDA_VISIBLE_DEVICES, or its like, right? On CPUs, "
            "measure and train with `device=cpu`",
        )
    chosen = assign_gpus(seats)
    compute = torch.device(device, chosen[rank])
    own = runtime_of(device).backend
    if "gloo" in (backend, own) or own not in get_args(Backend):
        return Place(compute, torch.device("cpu"))
    _check_own_gpus(seats, chosen, own)
    return Place(compute, compute)


def check_backend(device: DeviceType, backend: Backend | None) -> None:
    """Raise InputError for a backend that does not send from this kind of device, as NCCL from CPUs."""
    if backend not in (None, "gloo", runtime_of(device).backend):
        where = "`device=cpu` computes on none" if device == "cpu" else f"`device={device}` on others"
        raise InputError(
            f"`backend={backend}` sends from GPUs, and {where}", hint="leave out `backend`, or train on GPUs"
        )


def assign_gpus(seats: Sequence[Seat]) -> list[int]:
    """Return the index of each worker's GPU among those that it sees.

    Each takes the GPU that the fewest have taken, the first of these. So the workers of a host that all see the same
    GPUs have one each, in the order of their ranks, and a task that sees only its own GPU has that one. GPUs are told
    apart by their UUIDs, because an index means another GPU in another process.
    """
    taken: Counter[str] = Counter()
    chosen = [0] * len(seats)
    # Those that see the fewest come first: the others have a choice.
    for seat in sorted(seats, key=lambda seat: (len(seat.gpus), seat.rank)):
        index = min(range(len(seat.gpus)), key=lambda index: taken[seat.gpus[index].uuid])
        chosen[seat.rank] = index
        taken[seat.gpus[index].uuid] += 1
    return chosen


def take(place: Place) -> None:
    """Make the GPU of `place` the current device of this process, before anything is done on a GPU.

    Otherwise each process would make a context, some 500 MB, on GPU 0 as well: at a barrier, in a kernel of a library
    that asks for the current device.
    """
    runtime_of(place.compute).set_device(place.compute)


def _check_own_gpus(seats: Sequence[Seat], chosen: Sequence[int], backend: str) -> None:
    """Refuse NCCL, or its like, where it is not there, or where workers would share a GPU: whole, or in slices (MIG).

    NCCL tells GPUs apart by the address on the PCI bus, which slices of a GPU have in common.
    """
    name = backend.upper()
    if not dist.is_backend_available(backend):
        raise InputError(
            f"this PyTorch has no {name}", hint=f"send with `backend=gloo`, or install PyTorch with {name}"
        )
    on: dict[object, list[Seat]] = {}
    for seat in seats:
        gpu = seat.gpus[chosen[seat.rank]]
        on.setdefault(gpu.uuid if gpu.board is None else (seat.host, gpu.board), []).append(seat)
    sharing = next((users for users in on.values() if len(users) > 1), None)
    if sharing is not None:
        slices = len({seat.gpus[chosen[seat.rank]].uuid for seat in sharing}) > 1
        raise InputError(
            f"{names_of(sharing)} would {'have slices of' if slices else 'share'} one GPU, and {name} needs one for "
            "each",
            hint="start as many workers on each host as it has GPUs, or let them share with `backend=gloo`",
        )
