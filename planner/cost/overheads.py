"""What a worker takes of its GPU's memory beside tensors: context, communicators, fragmentation.

    held = tensors · (1 + fragmented) + context + communicators · bytes of one

On a CPU, and where the profile does not know the device, there is none of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.formats.cluster import Cluster
from planner.formats.profile import Device

# Of a process that uses CUDA: driver, loaded kernels, workspaces of cuBLAS and cuDNN. An assumption, where the profiler
# has not measured it; processes that load all of PyTorch's kernels eagerly take more than twice as much.
CONTEXT_BYTES = 512 * 2**20
# Of one communicator of NCCL: buffers of its channels and their peers. An assumption, not measured here; NCCL's
# NCCL_BUFFSIZE (4 MiB per channel and peer) and the number of channels decide it.
COMMUNICATOR_BYTES = 100 * 10**6
# Reserved by PyTorch's caching allocator beyond the peak of what is allocated. An assumption for steps that are all
# alike; Guo et al. 2024 (GMLake, abstract) report 15% on average for large language models that recompute and offload.
FRAGMENTED = 0.05


@dataclass(frozen=True)
class Reserve:
    """What is kept free of every device's memory, so that a search need not know of it.

    Attributes:
        fixed_bytes: whatever the tensors take.
        share: of the tensors' bytes.
    """

    fixed_bytes: int = 0
    share: float = 0.0

    def room(self, memory_bytes: int) -> int:
        """Return how many bytes of tensors fit; at least 1."""
        return max(1, math.floor((memory_bytes - self.fixed_bytes) / (1 + self.share)))

    def whole(self, tensor_bytes: int) -> int:
        """Return the memory that so many bytes of tensors need."""
        return tensor_bytes + int(tensor_bytes * self.share) + self.fixed_bytes

    def cluster(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the room of its devices as their memory."""
        return cluster.with_memory(self.room)


NO_RESERVE = Reserve()


@dataclass(frozen=True)
class Overheads:
    """The overheads of one worker, on devices of one type."""

    context_bytes: int
    communicator_bytes: int
    fragmented: float

    @classmethod
    def of(cls, device: Device) -> Overheads | None:
        """Return those of the device of a profile; None where there are none."""
        if device.kind != "cuda":
            return None
        measured = device.context_bytes
        return cls(CONTEXT_BYTES if measured is None else measured, COMMUNICATOR_BYTES, FRAGMENTED)

    @property
    def communicator_as_tensors(self) -> int:
        """Bytes of tensors that need as much memory as a communicator: nothing of it is fragmented."""
        return math.floor(self.communicator_bytes / (1 + self.fragmented))

    def reserve(self, communicators: int) -> Reserve:
        """Return what a worker with so many communicators needs."""
        return Reserve(self.context_bytes + communicators * self.communicator_bytes, self.fragmented)
