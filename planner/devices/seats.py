"""What a worker says of itself at the start, for all workers to choose alike."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import torch
from pydantic import Field

from planner.formats.files import Record


class Gpu(Record):
    """A GPU that a worker sees."""

    uuid: str  # the same in every process that sees this GPU
    name: str


class Seat(Record):
    """A worker, and what it would use."""

    rank: int
    host: str
    server: int  # number of the host, or of the part of it that one torchrun serves
    gpus: tuple[Gpu, ...]  # that it sees, in the order of its indices
    same: Mapping[str, str] = Field(default_factory=dict)  # what must be the same for all workers, by what it is


def own_seat(same: Mapping[str, str] | None = None) -> Seat:
    """Describe this worker, in the environment that torchrun sets."""
    return Seat(
        rank=int(os.environ["RANK"]),
        host=socket.gethostname(),
        server=int(os.environ.get("GROUP_RANK", "0")),
        gpus=visible_gpus(),
        same=same or {},
    )


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees; makes no context on them."""
    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(uuid=str(each.uuid), name=each.name) for each in properties)


def names_of(seats: Sequence[Seat]) -> str:
    """Name workers and their hosts: "worker 2 (host b) and worker 3 (host b)"."""
    shown = [f"worker {seat.rank} ({seat.host})" for seat in seats[:4]]
    if len(seats) > 4:
        shown.append(f"{len(seats) - 4} more")
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else shown[0]
