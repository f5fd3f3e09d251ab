"""What a simulation needs to know of a pipeline: seconds of its stages, bytes that they exchange,
and the cluster.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

from planner.cost.network.link import Buckets
from planner.cost.network.topology import Topology
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan_parts import Exchanged, Shared, Transfer
from planner.formats.profile import UNKNOWN_WEIGHT_SHARE, Shares
from planner.plan.lengths import Terms
from planner.schedule.instructions import Unit
from planner.schedule.schedule import PipelineShape

StagePair = tuple[int, int]


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one microbatch on one replica, and the bytes of the stage's all-reduce."""

    forward_s: float
    backward_s: float  # without the recomputation before it
    update_s: float
    recompute_s: float = 0.0  # the forward that is run once more before each backward
    # more of a backward, or its part for the weights, that adds to existing gradients
    accumulate_s: float = 0.0
    # of `backward_s`, for the gradients of weights; None for half of it
    weights_s: float | None = None
    # From the start of a backward that does not accumulate until each part of the gradients can be
    # all-reduced, as in `planner.cost.network.link`, with `late_s`; empty for parts that are evenly
    # spaced over the backward.
    ready_s: tuple[float, ...] = ()
    # of the gradients in each of these parts; empty for equal ones
    ready_shares: tuple[float, ...] = ()
    # of `recompute_s`, when there are gradients already, of layers behind those that recompute
    late_s: float = 0.0
    gradient_bytes: int = 0  # that the replicas all-reduce per round
    sharded: bool = False  # they only reduce-scatter these, and gather the weights after the update
    # of `gradient_bytes`, all-reduced whole even so, because other stages share the weights
    whole_bytes: int = 0
    exchanged: Exchanged | None = None  # within the seconds above, between the ranks of a replica
    # Where lengths vary, of the seconds above, which are means over microbatches: see
    # `PipelineCosts.terms`.
    forward_shares: Shares = ()
    backward_shares: Shares = ()

    @property
    def reduced_bytes(self) -> float:
        """Gradients that are all-reduced per round; a reduce-scatter is half of an all-reduce."""
        if not self.sharded:
            return self.gradient_bytes
        return (self.gradient_bytes + self.whole_bytes) / 2

    @property
    def gathered_bytes(self) -> float:
        """The same for the all-gather after the update, which is the other half."""
        if not self.sharded:
            return 0.0
        return self.gradient_bytes / 2

    def buckets(self, backward_s: float) -> Buckets:
        """Return the buckets that a backward of this length fills, with what recomputes
        within it.
        """
        if not self.ready_s or self.backward_s <= 0:
            return Buckets.even(backward_s)
        # `ready_s` is for a backward that does not accumulate; this one may be longer.
        longer = backward_s / (self.backward_s + self.late_s)
        shares = self.ready_shares or (1 / len(self.ready_s),) * len(self.ready_s)
        return Buckets(tuple(seconds * longer for seconds in self.ready_s), shares)

    @property
    def backward_weight_s(self) -> float:
        """Seconds of the backward for the gradients of weights, which may come later."""
        if self.weights_s is None:
            return UNKNOWN_WEIGHT_SHARE * self.backward_s
        return self.weights_s

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.recompute_s + self.backward_s + self.update_s


@dataclass(frozen=True)
class PipelineCosts:
    """A pipeline with the costs of its parts."""

    shape: PipelineShape
    cluster: Cluster
    stages: tuple[StageCosts, ...]
    # Of one microbatch's activations and of its gradients, by (source, target) stage.
    transfer_bytes: Mapping[StagePair, tuple[int, int]] = field(default_factory=dict)
    # Per round, gradients of the weights that two stages share, in either direction.
    shared_bytes: Mapping[StagePair, int] = field(default_factory=dict)
    # Of microbatches whose lengths vary, one after the other and then again from the first
    # (`planner.plan.lengths`): a cost is its mean times the sum of these terms with the cost's
    # shares. Empty where all are alike.
    terms: Terms = ()
    transfer_shares: Mapping[StagePair, Shares] = field(default_factory=dict)

    def factor(self, shares: Shares, unit: Unit) -> float:
        """Return a microbatch's cost, whose shares these are, in means."""
        if not (self.terms and shares):
            return 1.0
        number = (unit.minibatch * self.shape.microbatches + unit.microbatch) % len(self.terms)
        return float(sum(map(mul, self.terms[number], shares)))

    def stage(self, number: int, unit: Unit) -> StageCosts:
        """Return what a microbatch costs a stage."""
        costs = self.stages[number]
        if not self.terms:
            return costs
        longer = self.factor(costs.forward_shares, unit)
        seconds = {
            name: getattr(costs, name) * longer for name in ("forward_s", "recompute_s", "late_s")
        }
        backward = self.factor(costs.backward_shares, unit)
        return replace(
            costs,
            backward_s=costs.backward_s * backward,
            weights_s=costs.backward_weight_s * backward,
            **seconds,
        )

    def with_depths(self, depths: tuple[int, ...]) -> "PipelineCosts":
        """Return the pipeline with so many units in flight at each stage."""
        return replace(self, shape=replace(self.shape, depths=depths))

    @property
    def key(self) -> Hashable:
        """What a simulation depends on: the memory of the workers does not count."""
        by_stages = self.transfer_bytes, self.shared_bytes, self.transfer_shares
        exchanged = tuple(tuple(sorted(each.items())) for each in by_stages)
        return (
            self.shape,
            self.cluster.levels,
            tuple((kind.count, kind.link_ratios) for kind in self.cluster.kinds),
            self.cluster.overlap,
            self.stages,
            exchanged,
            self.terms,
        )

    @classmethod
    def of(
        cls,
        shape: PipelineShape,
        cluster: Cluster,
        stages: Sequence[StageCosts],
        transfers: Sequence[Transfer],
        shared: Sequence[Shared],
        degrees: Sequence[int],
        terms: Terms = (),
    ) -> "PipelineCosts":
        """Combine stages with the values that they exchange and the weights that they share.

        The processor's time for messages is added to the stages. `degrees`: ranks of a group of
        each stage. To a larger group, each rank of the smaller one sends as many copies as it takes
        to reach all.
        """
        topology = Topology(cluster)
        whole = list[StageCosts]()
        slowest = topology.link(len(topology) - 1)
        for number, costs in enumerate(stages):
            own = [
                transfer for transfer in transfers if number in (transfer.source, transfer.target)
            ]
            # each once
            weights = {
                each.weights: each.gradient_bytes for each in shared if number in each.stages
            }
            whole.append(
                replace(
                    costs,
                    whole_bytes=min(sum(weights.values()), costs.gradient_bytes),
                    forward_s=costs.forward_s
                    + float(slowest.handling_s(sum(each.output_bytes for each in own))),
                    backward_s=costs.backward_s
                    + float(slowest.handling_s(sum(each.gradient_bytes for each in own))),
                )
            )

        return cls(
            shape=shape,
            cluster=cluster,
            stages=tuple(whole),
            transfer_bytes={
                (t.source, t.target): (
                    t.output_bytes * math.ceil(degrees[t.target] / degrees[t.source]),
                    t.gradient_bytes * math.ceil(degrees[t.source] / degrees[t.target]),
                )
                for t in transfers
            },
            shared_bytes={
                pair: each.gradient_bytes
                for each in shared
                for pair in (each.stages, each.stages[::-1])
            },
            terms=terms,
            transfer_shares={(t.source, t.target): t.shares for t in transfers},
        )
