"""Measure what a process takes of a GPU before it trains: `python -m planner.selftest.workers.cuda_memory`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported by a star import

from planner.formats.files import Record, save_record


class CudaMemory(Record):
    """Bytes of a GPU that PyTorch's allocator does not count."""

    context_bytes: int  # of a CUDA context, with the kernels of a product
    communicator_bytes: int | None  # of one NCCL communicator of one worker; None without NCCL


def free_bytes(device: torch.device) -> int:
    """Return the bytes of the GPU that no process has."""
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def measure(before_bytes: int) -> CudaMemory:
    """Measure in this process.

    Args:
        before_bytes: that were free before this process touched the GPU, as another process saw.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    small = torch.ones(64, 64, device=device)
    small = small @ small  # loads cuBLAS, as every stage does
    in_context = free_bytes(device)
    context = before_bytes - in_context - torch.cuda.memory_reserved(device)
    if not dist.is_nccl_available():
        return CudaMemory(context_bytes=max(0, context), communicator_bytes=None)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    reserved = torch.cuda.memory_reserved(device)
    dist.all_reduce(small)  # communicators are made at their first use
    more = torch.cuda.memory_reserved(device) - reserved
    communicator = in_context - free_bytes(device) - more
    dist.destroy_process_group()
    return CudaMemory(context_bytes=max(0, context), communicator_bytes=max(0, communicator))


if __name__ == "__main__":
    save_record(measure(int(Path(sys.argv[1]).read_text(encoding="utf-8"))), sys.argv[2])
