"""The price of a plan, and what a worker takes of its GPU's memory beside tensors.

held = tensors · (1 + fragmented) + context + communicators · bytes of one
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.work import Footprint
from planner.formats.files import replace
from planner.formats.names import GPU_KINDS
from planner.formats.plan_parts import Bottleneck, StageMemory
from planner.formats.profile import Device


@dataclass(frozen=True)
class Price:
    """The price of a plan."""

    # by the cost model; or by simulation, and then `cost_model_s` is the cost model's
    seconds_per_minibatch: float
    bottleneck: Bottleneck
    in_flight: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    communication_bytes: float  # sent by all workers, per minibatch
    # position in the pipeline of each stage's worker; empty where each has its own
    worker_of: tuple[int, ...] = ()
    cost_model_s: float | None = None

    def simulated(self, seconds_per_minibatch: float) -> "Price":
        """Return the price with the seconds of a simulation, and the cost model's beside them."""
        if self.cost_model_s is None:
            formula_s = self.seconds_per_minibatch
        else:
            formula_s = self.cost_model_s
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
        return len(self.memory) // len(set(self.workers))

    @property
    def workers(self) -> Sequence[int]:
        return self.worker_of or range(len(self.memory))


def stage_memory(footprint: Footprint, in_flight: int, versions: int) -> StageMemory:
    """Return the memory of a replica with so many units in flight and weight versions, without a
    device's overheads.
    """
    return StageMemory(
        weights_bytes=int(footprint.weight_bytes) * versions,
        gradients_bytes=int(footprint.gradient_bytes),
        optimizer_bytes=int(footprint.optimizer_bytes),
        buffers_bytes=int(footprint.buffer_bytes),
        activations_bytes=int(footprint.saved_bytes) * in_flight + int(footprint.running_bytes),
        communication_bytes=int(footprint.message_bytes),
    )


# Of a process that uses CUDA: driver, loaded kernels, handles of cuBLAS and cuDNN. Workers load all
# kernels of PyTorch at their start: 1.96 to 2.29 GB on an H200 with PyTorch 2.11 for CUDA 13, of
# which those kernels take 1.3. Where the profiler has measured it on the device, that counts.
CONTEXT_BYTES = 2 * 10**9
# Of one communicator of NCCL: buffers of its channels and their peers. An assumption for servers
# with NVLink; NCCL's NCCL_BUFFSIZE (4 MiB per channel and peer) and the number of channels decide
# it. Over sockets 17 to 21 MB were found.
COMMUNICATOR_BYTES = 100 * 10**6
# Reserved by PyTorch's caching allocator beyond the peak of what is allocated. An assumption for
# steps that are all alike; Guo et al. 2024 (GMLake, abstract) report 15% on average for large
# language models that recompute and offload.
FRAGMENTED = 0.05


@dataclass(frozen=True)
class Reserve:
    """What is kept free of every device's memory beside tensors."""

    fixed_bytes: int = 0  # whatever the tensors take
    share: float = 0.0  # of the tensors' bytes

    def room(self, memory_bytes: int) -> int:
        """Return the bytes that are left for tensors."""
        return max(1, math.floor((memory_bytes - self.fixed_bytes) / (1 + self.share)))

    def whole(self, tensor_bytes: int) -> int:
        """Return what tensors of so many bytes take with the reserve."""
        return tensor_bytes + int(tensor_bytes * self.share) + self.fixed_bytes


NO_RESERVE = Reserve()


@dataclass(frozen=True)
class Overheads:
    """The overheads of one worker, on devices of one type."""

    context_bytes: int
    communicator_bytes: int = COMMUNICATOR_BYTES
    fragmented: float = FRAGMENTED

    @classmethod
    def of(cls, device: Device) -> "Overheads | None":
        """Return the overheads of a profiled GPU; None for other devices."""
        if device.kind not in GPU_KINDS:
            return None
        return cls(CONTEXT_BYTES if device.context_bytes is None else device.context_bytes)

    def reserve(self, communicators: int) -> Reserve:
        """Return what a process with so many communicators takes beside its tensors."""
        return Reserve(
            self.context_bytes + communicators * self.communicator_bytes, self.fragmented
        )
