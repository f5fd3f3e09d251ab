"""What a plan costs: its time, what limits it, and what each of its GPUs holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.cost.double_buffered import VERSIONS
from planner.cost.work import Footprint
from planner.formats.plan import Bottleneck, ScheduleName, StageMemory
from planner.schedule.instructions import POSTED


@dataclass(frozen=True)
class Price:
    """What a plan costs.

    `seconds_per_minibatch`: by the cost model, or by simulation where `cost_model_s` keeps what the cost model says.
    """

    seconds_per_minibatch: float
    bottleneck: Bottleneck
    in_flight: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    communication_bytes: float  # sent by all workers, per minibatch
    chunks: int = 1  # stages per worker: stage s is one of worker s mod (stages / chunks)
    cost_model_s: float | None = None

    def simulated(self, seconds_per_minibatch: float) -> Price:
        """The same plan, by simulation."""
        formula_s = self.seconds_per_minibatch if self.cost_model_s is None else self.cost_model_s
        return replace(self, seconds_per_minibatch=seconds_per_minibatch, cost_model_s=formula_s)

    @property
    def gpu_bytes(self) -> tuple[int, ...]:
        """For each stage, what a GPU that runs it holds, with its other stages."""
        workers = len(self.memory) // self.chunks
        totals = [memory.total_bytes for memory in self.memory]
        return tuple(sum(totals[stage % workers :: workers]) for stage in range(len(totals)))


def versions_of(schedule: ScheduleName, in_flight: int) -> int:
    """Versions of its weights that a stage keeps."""
    return {"1f1b": in_flight, "2bw": VERSIONS}.get(schedule, 1)


def stage_memory(footprint: Footprint, in_flight: int, versions: int) -> StageMemory:
    """What one replica of a stage holds, by use."""
    return StageMemory(
        weights_bytes=int(footprint.weight_bytes) * versions,
        gradients_bytes=int(footprint.gradient_bytes),
        optimizer_bytes=int(footprint.optimizer_bytes),
        buffers_bytes=int(footprint.buffer_bytes),
        activations_bytes=int(footprint.saved_bytes) * in_flight + int(footprint.working_bytes),
        communication_bytes=int(footprint.message_bytes) * POSTED,
    )
