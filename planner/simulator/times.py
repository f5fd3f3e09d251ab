"""What a pipeline takes: seconds of its stages' computations, bytes of what they exchange, and the links for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.cost.asynchronous import WEIGHT_SHARE, Link
from planner.cost.topology import Topology
from planner.formats.cluster import Cluster
from planner.formats.plan import Shared, Transfer
from planner.schedule.streams import PipelineShape

Ends = tuple[int, int]  # stages


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch on one replica.

    `recompute_s` comes before each backward: the forward once more. `accumulate_s` is what a backward takes longer
    that finds gradients to add its own to; where it is in two parts, with the part for the weights. `ready_s` are from
    the start of a backward that finds none until each part of the gradients can be all-reduced, as
    `planner.cost.buckets` has them; empty for equal parts of it.
    """

    forward_s: float
    backward_s: float
    update_s: float
    recompute_s: float = 0.0
    accumulate_s: float = 0.0
    ready_s: tuple[float, ...] = ()

    @property
    def weight_s(self) -> float:
        """The part of the backward that is for the weights, where it is in two parts."""
        return WEIGHT_SHARE * self.backward_s

    @property
    def compute_s(self) -> float:
        """All that the processor does."""
        return self.forward_s + self.recompute_s + self.backward_s + self.update_s


@dataclass(frozen=True)
class Pipeline:
    """All that a simulation needs to know.

    Args:
        shape: who runs which stage, and who exchanges what with whom.
        cluster: with the links between them.
        stages: seconds of each.
        transfer_bytes: of one microbatch's activations and gradients, by (source, target) stage.
        gradient_bytes: that the replicas of each stage all-reduce per round.
        shared_bytes: gradients of the weights that two stages share, either way, per round.
    """

    shape: PipelineShape
    cluster: Cluster
    stages: tuple[StageTimes, ...]
    transfer_bytes: Mapping[Ends, tuple[int, int]] = field(default_factory=dict)
    gradient_bytes: tuple[int, ...] = ()
    shared_bytes: Mapping[Ends, int] = field(default_factory=dict)


def pipeline_with(
    shape: PipelineShape,
    cluster: Cluster,
    stages: Sequence[StageTimes],
    transfers: Sequence[Transfer],
    gradient_bytes: Sequence[int],
    shared: Sequence[Shared],
) -> Pipeline:
    """A pipeline whose stages exchange these values, and these gradients of weights that they share."""
    topology = Topology(cluster)
    slowest = topology.link(len(topology) - 1)
    return Pipeline(
        shape=shape,
        cluster=cluster,
        stages=tuple(_with_handling(times, number, transfers, slowest) for number, times in enumerate(stages)),
        transfer_bytes={(t.source, t.target): (t.output_bytes, t.gradient_bytes) for t in transfers},
        gradient_bytes=tuple(gradient_bytes),
        shared_bytes={ends: each.gradient_bytes for each in shared for ends in (each.stages, each.stages[::-1])},
    )


def _with_handling(times: StageTimes, stage: int, transfers: Sequence[Transfer], link: Link) -> StageTimes:
    """Where messages do not travel while a device computes, handling them is its processor's work."""
    own = [transfer for transfer in transfers if stage in (transfer.source, transfer.target)]
    return replace(
        times,
        forward_s=times.forward_s + float(link.handling_s(sum(transfer.output_bytes for transfer in own))),
        backward_s=times.backward_s + float(link.handling_s(sum(transfer.gradient_bytes for transfer in own))),
    )
