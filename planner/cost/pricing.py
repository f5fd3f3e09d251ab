"""Price plans: layer costs, stages and setting go in; time, bottleneck, memory and bytes sent come out."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.candidate import Candidate
from planner.cost.communicators import with_overheads
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.cost_model import UnpricedPlan
from planner.cost.models.registry import cost_model_of
from planner.cost.network.placement import Busy
from planner.cost.overheads import Price, stage_memory
from planner.cost.setting import Setting


def price(layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting) -> Price:
    """Price a whole plan.

    With several chunks per worker, the number of stages is a multiple of them, and all stages have as many replicas.
    """
    plan, model, schedule = UnpricedPlan(layer_costs, stages, setting), cost_model_of(setting), setting.schedule
    time, held = model.time(plan), model.held(plan)
    memory = tuple(
        stage_memory(layer_costs.footprint(stage).divided(setting.microbatches), saved, schedule.versions(saved))
        for stage, saved in zip(stages, held.saved, strict=True)
    )
    workers = len(stages) // setting.chunks
    worker_of = tuple(schedule.worker_of(stage, workers) for stage in range(len(stages)))
    memory = with_overheads(layer_costs, stages, memory, worker_of)
    return Price(time.seconds, time.bottleneck, held.in_flight, memory, _sent_bytes(plan), worker_of)


def busy_resources(layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting) -> Sequence[Busy]:
    """Return the busy seconds per minibatch of every resource of every stage.

    Under synchronous schedules these are its part of the maximum. With several chunks per worker there is one entry per
    worker, in the order of their first stages.
    """
    return cost_model_of(setting).time(UnpricedPlan(layer_costs, stages, setting)).busy


def _sent_bytes(plan: UnpricedPlan) -> float:
    """Count the bytes that all workers send for one minibatch: transfers both ways, and the stages' all-reduces.

    A ring of r workers moves 2(r-1)·W in all, once per round of r minibatches under 1f1b and naive, once per minibatch
    where that is divided. What ranks of one group send to each other does not count.
    """
    works, replicas, degrees = plan.works, plan.replicas, [stage.options.tensor for stage in plan.stages]
    transfers = sum(float(work.sent_bytes) * t for work, t in zip(works, degrees, strict=True))
    transfers *= plan.setting.microbatches
    rings = [2 * (r - 1) * t * float(each.trainable_bytes) for each, r, t in zip(works, replicas, degrees, strict=True)]
    if plan.setting.schedule.divides:
        return transfers + sum(rings)
    return transfers + sum(ring / r for ring, r in zip(rings, replicas, strict=True))
