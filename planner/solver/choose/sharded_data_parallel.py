"""Data parallelism that divides its state over the GPUs: ZeRO (Rajbhandari et al. 2020), whose third stage FSDP runs.

Every GPU computes the whole model. With r GPUs, k microbatches on each between two updates, W bytes of weights, G of
gradients, O of the optimizer's state (section 5, figure 1):

    stage   each GPU keeps        and exchanges in an update
    1       W + G + O/r           gradients once (reduce-scatter), weights once (all-gather)
    2       W + (G + O)/r         gradients k times, because nobody keeps their sum; weights once
    3       (W + G + O)/r         gradients k times, weights 2k times: before each forward and each backward

A reduce-scatter and an all-gather are the halves of a ring all-reduce, (r-1)/r of the bytes each (section 7): with
k = 1 stages 1 and 2 move what data parallelism moves, and stage 3 half as much again. A GPU holds besides, under
stages 2 and 3, a bucket of gradients, and under stage 3 the weights of two blocks: one runs, the next is on its way.
Exchanges overlap with the computation beside them, except for the first part of the weights or the last of the
gradients, and for the weights after an update. Weights move in the type that they are stored in.

Stage 1 is a stage of a plan whose optimizer is sharded, which can be trained and simulated; here are the other two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from planner.cost.candidate import Candidate
from planner.cost.communicators import with_overheads
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.buckets import bucket_bytes, buckets_of
from planner.cost.network.link import BUCKETS, Link, ring_all_reduce_s
from planner.cost.work import Work
from planner.formats.plan_parts import StageMemory
from planner.plan.blocks import blocks_of
from planner.solver.evaluate.evaluation import priced
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation

ZeroStage: TypeAlias = Literal[2, 3]


def sharded_data_parallel(problem: Problem, stages: Sequence[Candidate], zero: ZeroStage) -> Evaluation:
    """Price data parallelism with this stage of ZeRO, by the equations above.

    Args:
        problem: of pricing plans under a schedule without chunks; it says how many microbatches are between updates.
        stages: one stage of all layers, with two replicas or more, whose optimizer is not sharded.
        zero: the stage of ZeRO, which says what is divided.
    """
    plain = priced(problem, stages)
    replicas = _Replicas.of(problem, stages[0])
    per_update = 1 if problem.schedule.divides else replicas.count  # minibatches
    divided = _memory(problem, plain.price.memory[0], zero, replicas.count)
    memory = with_overheads(problem.layer_costs, plain.stages, [divided], [0])
    seconds = replicas.update_s(zero) / per_update
    price = replace(
        plain.price,
        seconds_per_minibatch=seconds,
        bottleneck=plain.price.bottleneck.model_copy(update={"busy_s": seconds}),
        memory=memory,
        communication_bytes=replicas.sent_bytes(zero) / per_update,
    )
    sharded = replace(stages[0], options=replace(stages[0].options, sharded=True))
    return Evaluation((sharded,), price)


@dataclass(frozen=True)
class _Replicas:
    """The GPUs of data parallelism, from one update to the next.

    Attributes:
        count: how many.
        each: microbatches on each.
        layer_costs: of the model.
        work: of the model, for one microbatch.
        link: between them.
    """

    count: int
    each: int
    layer_costs: LayerCosts
    work: Work
    link: Link

    @classmethod
    def of(cls, problem: Problem, replicated: Candidate) -> _Replicas:
        count, layer_costs = replicated.replicas, problem.layer_costs
        link = problem.topology.stage_link(range(count)) if problem.placed else problem.link
        return cls(count, -(-problem.microbatches // count), layer_costs, layer_costs.work(replicated), link)

    def update_s(self, zero: ZeroStage) -> float:
        """Return the seconds from one update to the next."""
        work = self.work
        forward_s = float(work.forward_s + work.recompute_s)
        # Each GPU accumulates and updates its part alone.
        own_s = (float(work.update_s) + (self.each - 1) * float(work.accumulate_s)) / self.count
        gather_s, scatter_s = self._half_s(self.weight_bytes), self._half_s(float(work.trainable_bytes))
        if zero == 2:
            return self.each * (forward_s + self._reduced_s(scatter_s)) + own_s + gather_s
        return self.each * (self._gathered_s(forward_s, gather_s) + self._reduced_s(gather_s + scatter_s)) + own_s

    def sent_bytes(self, zero: ZeroStage) -> float:
        """Count the bytes that all GPUs send between two updates."""
        gathers = 1 if zero == 2 else 2 * self.each
        return (self.count - 1) * (self.each * float(self.work.trainable_bytes) + gathers * self.weight_bytes)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return float(sum(layer.weight_bytes for layer in self.layer_costs.profile.layers))

    def _half_s(self, size_bytes: float) -> float:
        return float(ring_all_reduce_s(size_bytes, self.count, self.link)) / 2

    def _reduced_s(self, exchange_s: float) -> float:
        """Return the seconds of a backward with an exchange beside it, part by part as gradients become complete."""
        buckets = buckets_of(self.layer_costs.profile.layers)
        return buckets.reduced_s(exchange_s) if self.link.overlap else buckets.ready_s[-1] + exchange_s

    def _gathered_s(self, forward_s: float, gather_s: float) -> float:
        """Return the seconds of a forward whose weights arrive beside it; nothing can run before the first part."""
        return max(forward_s + gather_s / BUCKETS, gather_s) if self.link.overlap else forward_s + gather_s


def _memory(problem: Problem, whole: StageMemory, zero: ZeroStage, replicas: int) -> StageMemory:
    """Divide the memory of data parallelism, `whole`."""
    layers = problem.layer_costs.profile.layers
    blocks = blocks_of(problem.layer_costs.profile)
    sizes = [sum(layer.weight_bytes for layer in layers[block.start : block.stop]) for block in blocks]
    pair_bytes = max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))

    def part(size: int) -> int:
        return -(-size // replicas)

    bucket = min(bucket_bytes(whole.gradients_bytes), whole.gradients_bytes)
    held = {
        "optimizer_bytes": part(whole.optimizer_bytes),
        "gradients_bytes": min(part(whole.gradients_bytes) + bucket, whole.gradients_bytes),
    }
    if zero == 3:
        held["weights_bytes"] = min(part(whole.weights_bytes) + pair_bytes, whole.weights_bytes)
    return whole.model_copy(update=held)
