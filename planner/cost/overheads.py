"""What a worker takes of its GPU's memory beside tensors: context, communicators, fragmentation.

    held = tensors · (1 + fragmented) + context + communicators · bytes of one

On a CPU, and where the profile does not know the device, there is none of it.

`Price` is the result of pricing a plan: its time, its bottleneck, and the memory of its GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cost.work import Footprint
from planner.formats.cluster import Cluster
from planner.formats.names import GPU_KINDS
from planner.formats.plan_parts import Bottleneck, StageMemory
from planner.formats.profile import Device


@dataclass(frozen=True)
class Price:
    """The price of a plan."""

    seconds_per_minibatch: float  # by the cost model; or by simulation, and then `cost_model_s` is the cost model's
    bottleneck: Bottleneck
    in_flight: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    communication_bytes: float  # sent by all workers, per minibatch
    worker_of: tuple[int, ...] = ()  # position in the pipeline of each stage's worker; empty where each has its own
    cost_model_s: float | None = None

    def simulated(self, seconds_per_minibatch: float) -> Price:
        """Return the price with the time of a simulation."""
        formula_s = self.seconds_per_minibatch if self.cost_model_s is None else self.cost_model_s
        return replace(self, seconds_per_minibatch=seconds_per_minibatch, cost_model_s=formula_s)

    @property
    def gpu_bytes(self) -> tuple[int, ...]:
        """Each stage's GPU's memory, with the GPU's other stages."""
        held: Counter[int] = Counter()
        for worker, memory in zip(self.workers, self.memory, strict=True):
            held[worker] += memory.total_bytes
        return tuple(held[worker] for worker in self.workers)

    @property
    def chunks(self) -> int:
        """Stages per worker."""
        return len(self.memory) // len(set(self.workers))

    @property
    def workers(self) -> Sequence[int]:
        """Each stage's worker, by its position in the pipeline."""
        return self.worker_of or range(len(self.memory))


def stage_memory(footprint: Footprint, in_flight: int, versions: int) -> StageMemory:
    """Return the memory of one replica of a stage, by use."""
    return StageMemory(
        weights_bytes=int(footprint.weight_bytes) * versions + int(footprint.fixed_weight_bytes),
        gradients_bytes=int(footprint.gradient_bytes),
        optimizer_bytes=int(footprint.optimizer_bytes),
        buffers_bytes=int(footprint.buffer_bytes),
        activations_bytes=int(footprint.saved_bytes) * in_flight + int(footprint.running_bytes),
        communication_bytes=int(footprint.message_bytes),
    )


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
    """What is kept free of every device's memory, so that a search need not know of it."""

    fixed_bytes: int = 0  # whatever the tensors take
    share: float = 0.0  # of the tensors' bytes

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
        if device.kind not in GPU_KINDS:
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
