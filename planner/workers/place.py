"""Where a worker computes and sends from: one rule, which every worker applies to what all of them
said of themselves.

NCCL sends from a GPU and needs one for each worker. gloo sends from the CPU, so that several
workers may share a GPU; that is slower and never chosen unasked. Workers that share one over NCCL,
to try on one GPU what runs on several, must look to it like hosts of their own.
"""

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, get_args
from zlib import crc32

import torch
import torch.distributed as dist
from pydantic import Field

from planner.errors import InputError
from planner.formats.files import Record
from planner.formats.names import Backend, DeviceType
from planner.runtime import kinds_here, runtime_of
from planner.workers.interfaces import address_towards

# What CUDA and NCCL read at their start, where a pipeline needs other values than their defaults.
GPU_VARIABLES = {
    # Hardware queues, 8 unless set. Streams that share one wait for each other's launches: a send
    # whose peer is not ready would hold back the receive behind it, and the peer may be waiting for
    # that very worker.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "GPU_MAX_HW_QUEUES": "32",  # the same for GPUs of ROCm
    # All kernels are loaded at the start: at its first use one may wait for a message that waits
    # for this worker.
    "CUDA_MODULE_LOADING": "EAGER",
    # All connections of a communicator are made with it, and not in the middle of training.
    "NCCL_RUNTIME_CONNECT": "0",
    # Otherwise PyTorch warns on each worker that messages get communicators of their own, which is
    # what is wanted.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def set_gpu_variables() -> None:
    """Set those that the user has not set, for this process; before anything is done on a GPU in
    it.
    """
    for name, value in GPU_VARIABLES.items():
        os.environ.setdefault(name, value)


class Gpu(Record):
    """A GPU that a worker sees."""

    uuid: str  # the same in every process that sees this GPU
    name: str
    # its place on the PCI bus, if PyTorch tells: slices of one GPU (MIG) have one place
    board: str | None = None


class Seat(Record):
    """A worker, and what it would use."""

    rank: int
    host: str
    server: int  # number of the host, or of the part of it that one torchrun serves
    gpus: tuple[Gpu, ...]  # that it sees, in the order of its indices
    kind: DeviceType = "cuda"  # of these
    address: str | None = None  # that it sends from to worker 0's host
    # what must be the same for all workers, by what it is
    same: Mapping[str, str] = Field(default_factory=dict)


def own_seat(same: Mapping[str, str] | None = None, device: DeviceType | None = None) -> Seat:
    """Describe this worker, in the environment that torchrun sets, and the GPUs of the kind
    `device` that it sees.
    """
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
    """Return the devices of a kind that this process sees, none of the kind "cpu"; makes no context
    on them.
    """
    if kind == "cpu":
        return ()
    found = []
    for device in (torch.device(kind, index) for index in range(runtime_of(kind).count())):
        properties = runtime_of(kind).properties(device)
        # Without one, a device is told apart by its index, which holds where all processes see the
        # same devices.
        uuid = str(getattr(properties, "uuid", f"{socket.gethostname()} {device}"))
        bus = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        board = None
        if None not in bus:
            board = ":".join(f"{part:02x}" for part in bus)
        found.append(Gpu(uuid=uuid, name=properties.name, board=board))

    return tuple(found)


def names_of(seats: Sequence[Seat]) -> str:
    """Name workers and their hosts: "worker 2 (host b) and worker 3 (host b)"."""
    shown = [f"worker {seat.rank} ({seat.host})" for seat in seats[:4]]
    return " and ".join([*shown, f"{len(seats) - 4} more"] if len(seats) > 4 else shown)


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_to_send(workers: int) -> bool:
    """Return whether this host has a core for gloo's threads beside the one that each worker
    computes on.
    """
    return available_cores() >= 2 * workers


@dataclass(frozen=True)
class Place:
    """The device that a worker computes on, and the one that its messages are made on."""

    compute: torch.device
    wire: torch.device
    nccl_host: str | None = None  # the host that NCCL takes this worker to be on; None for its own

    @property
    def kind(self) -> str:
        return self.compute.type

    @property
    def device_name(self) -> str | None:
        return getattr(runtime_of(self.compute).properties(self.compute), "name", None)

    @property
    def backend(self) -> Backend:
        return cast("Backend", runtime_of(self.wire).backend)


CPU = Place(torch.device("cpu"), torch.device("cpu"))


def kind_here() -> DeviceType:
    """Return the kind of device to use where nobody says which: that of GPUs if PyTorch sees any,
    else "cpu".
    """
    return kinds_here()[0]


def gpus_here() -> int:
    """Return how many GPUs this process sees."""
    if (kind := kind_here()) == "cpu":
        return 0
    return runtime_of(kind).count()


def choose_place(
    seats: Sequence[Seat], rank: int, device: DeviceType | None, backend: Backend | None
) -> Place:
    """Choose the place of worker `rank`; all workers choose alike, because they decide by the same
    seats.

    Raises:
        InputError: when some workers see no GPU, or when NCCL would have to serve several workers
            on one.
    """
    if device is None:
        device = next((seat.kind for seat in seats if seat.gpus), "cpu")
    check_backend(device, backend)
    if device == "cpu":
        return CPU
    _check_gpus(seats, device)

    chosen = assign_gpus(seats)
    compute = torch.device(device, chosen[rank])
    library = runtime_of(device).backend
    if "gloo" in (backend, library) or library not in get_args(Backend):
        return Place(compute, torch.device("cpu"))
    if not dist.is_backend_available(library):
        raise InputError(f"this PyTorch has no {library.upper()}", hint="send with `backend=gloo`")

    gpus = [seat.gpus[index] for seat, index in zip(seats, chosen, strict=True)]
    sharing = _sharing(seats, gpus)
    if not sharing:
        return Place(compute, compute)
    if library == backend == "nccl":
        return Place(compute, compute, nccl_host=f"{seats[rank].host} {rank}")
    slices = len({gpus[each].uuid for each in sharing}) > 1
    what = "have slices of" if slices else "share"
    names = names_of([seats[each] for each in sharing])
    hint = (
        "start as many workers on each host as it has GPUs, or let them share with `backend=gloo`"
    )
    if library == "nccl":
        hint = f"{hint}; `backend=nccl` shares, too, and is for trying NCCL on one GPU"
    raise InputError(
        f"{names} would {what} one GPU, and {library.upper()} needs one for each", hint=hint
    )


def _check_gpus(seats: Sequence[Seat], device: DeviceType) -> None:
    """Raise InputError when some workers see no GPU of this kind."""
    without = [seat for seat in seats if not seat.gpus or seat.kind != device]
    if not without:
        return
    others = ""
    if len(without) < len(seats):
        others = ", but others do"
    raise InputError(
        f"PyTorch sees no GPU in {names_of(without)}{others}",
        hint=f"is PyTorch there built for {device}, and is CUDA_VISIBLE_DEVICES, or its like, "
        f"right? Or use `device=cpu`",
    )


def _sharing(seats: Sequence[Seat], gpus: Sequence[Gpu]) -> list[int]:
    """Return the workers that share a GPU with others, the first such GPU; none where each has its
    own.

    NCCL tells GPUs apart by their place on the bus, which slices of one GPU have in common.
    """
    workers: dict[str, list[int]] = {}
    for rank, (seat, gpu) in enumerate(zip(seats, gpus, strict=True)):
        place = gpu.uuid if gpu.board is None else f"{seat.host} {gpu.board}"
        workers.setdefault(place, []).append(rank)
    return next((ranks for ranks in workers.values() if len(ranks) > 1), [])


def check_backend(device: DeviceType, backend: Backend | None) -> None:
    """Raise InputError for a backend that does not send from this kind of device, as NCCL from
    CPUs.
    """
    if backend not in (None, "gloo", runtime_of(device).backend):
        where = "`device=cpu` computes on none"
        if device != "cpu":
            where = f"`device={device}` on others"
        raise InputError(
            f"`backend={backend}` sends from GPUs, and {where}", hint="leave out `backend`"
        )


def assign_gpus(seats: Sequence[Seat]) -> list[int]:
    """Return the index of each worker's GPU among those that it sees.

    Each takes the GPU that the fewest have taken, the first of these. GPUs are told apart by their
    UUIDs, because an index means another GPU in another process.
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
    """Make the GPU of `place` the current device: otherwise each process would make a context on
    GPU 0 as well.
    """
    if place.nccl_host is not None:
        os.environ["NCCL_HOSTID"] = place.nccl_host
    runtime_of(place.compute).set_device(place.compute)
