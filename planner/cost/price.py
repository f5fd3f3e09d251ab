"""The result of pricing a plan: its time, its bottleneck, and the memory of its GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cost.work import Footprint
from planner.formats.plan_parts import Bottleneck, StageMemory
from planner.schedule.instructions import POSTED


@dataclass(frozen=True)
class Price:
    """The price of a plan.

    `seconds_per_minibatch` is the cost model's; or the simulation's, and then `cost_model_s` is the cost model's.
    """

    seconds_per_minibatch: float
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
        communication_bytes=int(footprint.message_bytes) * POSTED,
    )
