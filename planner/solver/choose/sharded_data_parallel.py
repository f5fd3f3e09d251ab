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
from dataclasses import replace
from typing import Literal, TypeAlias

from planner.cost.candidate import Candidate
from planner.cost.communicators import with_overheads
from planner.cost.network.link import BUCKETS, bucket_bytes, buckets_of, ring_all_reduce_s
from planner.formats.plan_parts import StageMemory
from planner.formats.profile import Profile
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
    plain, (stage,) = priced(problem, stages), stages
    gpus, profile, work = stage.replicas, problem.layer_costs.profile, problem.layer_costs.work(stage)
    each = -(-problem.microbatches // gpus)  # microbatches on each GPU between two updates
    link = problem.topology.stage_link(range(gpus)) if problem.placed else problem.link
    weight_bytes = float(sum(layer.weight_bytes for layer in profile.layers))

    def half_s(size_bytes: float) -> float:
        return float(ring_all_reduce_s(size_bytes, gpus, link)) / 2

    def backward_s(exchange_s: float) -> float:
        """Return the seconds of a backward with an exchange beside it, part by part as gradients become complete."""
        buckets = buckets_of(profile.layers)
        return buckets.reduced_s(exchange_s) if link.overlap else buckets.ready_s[-1] + exchange_s

    forward_s = float(work.forward_s + work.recompute_s)
    # Each GPU accumulates and updates its part alone.
    own_s = (float(work.update_s) + (each - 1) * float(work.accumulate_s)) / gpus
    gather_s, scatter_s = half_s(weight_bytes), half_s(float(work.trainable_bytes))
    if zero == 2:
        gathers, seconds = 1, each * (forward_s + backward_s(scatter_s)) + own_s + gather_s
    else:
        # Weights arrive beside the forward, of which nothing can run before the first part.
        gathered_s = max(forward_s + gather_s / BUCKETS, gather_s) if link.overlap else forward_s + gather_s
        gathers, seconds = 2 * each, each * (gathered_s + backward_s(gather_s + scatter_s)) + own_s
    sent_bytes = (gpus - 1) * (each * float(work.trainable_bytes) + gathers * weight_bytes)
    per_update = 1 if problem.schedule.divides else gpus  # minibatches
    divided = _memory(profile, plain.price.memory[0], zero, gpus)
    price = replace(
        plain.price,
        seconds_per_minibatch=seconds / per_update,
        bottleneck=plain.price.bottleneck.model_copy(update={"busy_s": seconds / per_update}),
        memory=with_overheads(problem.layer_costs, plain.stages, [divided], [0]),
        communication_bytes=sent_bytes / per_update,
    )
    return Evaluation((replace(stage, options=replace(stage.options, sharded=True)),), price)


def _memory(profile: Profile, whole: StageMemory, zero: ZeroStage, gpus: int) -> StageMemory:
    sizes = [sum(layer.weight_bytes for layer in profile.layers[b.start : b.stop]) for b in blocks_of(profile)]
    two_blocks_bytes = max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))
    bucket = min(bucket_bytes(whole.gradients_bytes), whole.gradients_bytes)
    held = {
        "optimizer_bytes": -(-whole.optimizer_bytes // gpus),
        "gradients_bytes": min(-(-whole.gradients_bytes // gpus) + bucket, whole.gradients_bytes),
    }
    if zero == 3:
        held["weights_bytes"] = min(-(-whole.weights_bytes // gpus) + two_blocks_bytes, whole.weights_bytes)
    return whole.model_copy(update=held)
