"""A candidate plan as the simulation sees it: shape, seconds of stages, and what they exchange."""

from collections.abc import Sequence

import numpy as np

from planner.cost.candidate import Candidate, Traffic
from planner.cost.fully_sharded import sharded_times
from planner.cost.layer_costs import LayerCosts, messages
from planner.cost.setting import Setting
from planner.cost.weight_copies import buckets_in, copied_in, gradients_bytes, shared_in
from planner.formats.files import replace
from planner.formats.plan_parts import Shared, Transfer
from planner.formats.profile import Layer, Shares
from planner.plan.lengths import planned, planned_terms
from planner.plan.shape import trainable_pairs
from planner.plan.shared_weights import SharedWeight
from planner.schedule.schedule import Channel, PipelineShape
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.stages.tensor import degrees_of


def too_large(problem: Problem, stages: Sequence[Candidate]) -> bool:
    """Return whether simulating these stages takes longer than a search should."""
    tuning = problem.tuning.evaluate
    if problem.schedule.asynchronous:
        workers = sum(stage.replicas for stage in stages)
        if workers > tuning.most_workers:
            return True
    else:
        workers = len(stages) // problem.setting.chunks

    return workers * problem.microbatches > tuning.most_forwards


def pipeline_for(problem: Problem, candidate: Evaluation) -> PipelineCosts:
    """Return what `planner.simulator.simulate_plan.costs_of` makes of the candidate's plan."""
    layer_costs = problem.layer_costs
    stages = candidate.stages
    moved = transfers(layer_costs, stages)
    shared = shared_between(layer_costs, stages)
    shape = PipelineShape(
        ranks=candidate.ranks,
        channels=tuple(Channel(t.source, t.target, t.gradient_bytes > 0) for t in moved),
        schedule=problem.schedule,
        microbatches=problem.microbatches,
        depths=candidate.price.in_flight,
        shared=trainable_pairs(shared, [stage.replicas for stage in stages], problem.schedule),
    )

    return PipelineCosts.of(
        shape,
        problem.cluster,
        stage_costs(layer_costs, stages, problem.setting),
        moved,
        shared,
        degrees=degrees_of(stage.options for stage in stages),
        terms=planned_terms(planned(layer_costs.profile, problem.microbatches)),
    )


def stage_costs(
    layer_costs: LayerCosts,
    stages: Sequence[Candidate],
    setting: Setting,
) -> list[StageCosts]:
    """Return the costs of each stage with its copies of shared weights.

    At levels 2 and 3 the seconds are those of all exchanges, too.
    """
    if stages[0].options.shards_gradients:
        return [_fully_sharded_costs(layer_costs, stages[0], setting)]

    copies = copied_in(layer_costs, stages)
    costs = [_costs_of(layer_costs, *each) for each in zip(stages, copies, strict=True)]
    if not setting.schedule.splits_backward:
        return costs
    return [
        replace(each, weights_s=float(layer_costs.work(stage).backward_weight_s))
        for each, stage in zip(costs, stages, strict=True)
    ]


def _fully_sharded_costs(layer_costs: LayerCosts, stage: Candidate, setting: Setting) -> StageCosts:
    """Return the costs of a plan's only stage whose replicas divide gradients or weights."""
    times = sharded_times(layer_costs, stage, setting)
    return StageCosts(
        **vars(times),
        recompute_s=float(layer_costs.work(stage).recompute_s),
        forward_shares=layer_costs.shares(stage, "forward_s", times.forward_s),
        backward_shares=layer_costs.shares(stage, "backward_s", times.backward_s),
    )


def _costs_of(layer_costs: LayerCosts, stage: Candidate, copied: Sequence[Layer]) -> StageCosts:
    """Return the costs of a stage that also updates copies of weights of these layers."""
    work = layer_costs.work(stage)
    forward_s = float(work.forward_s)
    backward_s = float(work.backward_s)
    update_s = float(work.update_s) + sum(layer.update_s for layer in copied)

    buckets = buckets_in(layer_costs, stage, copied)
    late_s = 0.0
    if buckets.ready_s:
        late_s = max(0.0, buckets.ready_s[-1] - backward_s)

    return StageCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s / stage.options.shards,
        recompute_s=float(work.recompute_s),
        accumulate_s=float(work.accumulate_s) + sum(layer.accumulate_s for layer in copied),
        ready_s=buckets.ready_s,
        ready_shares=buckets.shares,
        late_s=late_s,
        gradient_bytes=int(work.trainable_bytes) + sum(layer.gradient_bytes for layer in copied),
        sharded=stage.options.shards_optimizer,
        exchanged=layer_costs.exchanged(stage),
        forward_shares=layer_costs.shares(stage, "forward_s", forward_s),
        backward_shares=layer_costs.shares(stage, "backward_s", backward_s),
    )


def transfers(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> tuple[Transfer, ...]:
    """Return what each stage sends to which (see `messages`)."""
    return tuple(
        Transfer(
            source=source,
            target=target,
            values=tuple(value.name for value in values),
            output_bytes=sum(value.sent_bytes for value in values),
            gradient_bytes=sum(value.returned_bytes for value in values),
            shares=_mean_shares(values),
        )
        for (source, target), values in sorted(messages(layer_costs, stages).items())
    )


def _mean_shares(values: Sequence[Traffic]) -> Shares:
    """Return the mean of the values' shares, weighted by bytes; empty where lengths do not vary."""
    if not values[0].shares:
        return ()

    weights = [max(1, value.sent_bytes) for value in values]
    mean = np.average([value.shares for value in values], axis=0, weights=weights)
    return tuple(mean.tolist())


def shared_between(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> tuple[Shared, ...]:
    """Return the weights that two stages train, for each two stages."""
    by_stages: dict[tuple[int, int], list[SharedWeight]] = {}
    for weight in shared_in(layer_costs, stages):
        by_stages.setdefault(weight.stages, []).append(weight)

    return tuple(
        Shared(
            stages=pair,
            weights=tuple(weight.name for weight in weights),
            # A weight is counted in the first layer that has it.
            gradient_bytes=gradients_bytes(
                layer_costs,
                stages[pair[0]],
                {weight.layers[0] for weight in weights},
            ),
        )
        for pair, weights in sorted(by_stages.items())
    )
