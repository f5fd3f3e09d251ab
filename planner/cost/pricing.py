"""The price of a plan: seconds per minibatch, bottleneck, memory and bytes sent, from the formulas of `cost`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from planner.cost.asynchronous import Resource, link_of
from planner.cost.double_buffered import asynchronous_model
from planner.cost.interleaved import InterleavedModel, StageSeconds
from planner.cost.layer_costs import Candidate, LayerCosts, exchanges
from planner.cost.placement import Placement, places_matter
from planner.cost.plan_price import Price, stage_memory
from planner.cost.setting import Setting
from planner.cost.synchronous import SynchronousModel
from planner.cost.topology import Topology
from planner.cost.work import Floats, Work
from planner.formats.plan import Bottleneck
from planner.schedule.schedule import Schedule


def price(layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting) -> Price:
    """Price a whole plan.

    With several chunks per worker, the number of stages is a multiple of them, and all stages have as many replicas.
    """
    schedule, microbatches = setting.schedule, setting.microbatches
    works = [layer_costs.work(stage) for stage in stages]
    replicas = [stage.replicas for stage in stages]
    sums, busy = _resources(layer_costs, stages, setting)
    bottleneck = _busiest(busy)
    seconds = bottleneck.busy_s
    in_flight: Sequence[int] = schedule.depths(replicas, microbatches, setting.chunks)
    if schedule.formula == "synchronous":
        seconds += sum(sums)
        slowest = max(range(len(sums)), key=sums.__getitem__)
        if bottleneck.busy_s <= 0:
            bottleneck = Bottleneck(stage=slowest, resource="compute", busy_s=sums[slowest])
    saved = in_flight
    if schedule.splits_backward and not schedule.chunked:
        waiting = _waiting(layer_costs, stages, setting, in_flight)
        saved = [flying + 2 * more for flying, more in zip(in_flight, waiting, strict=True)]
        in_flight = [flying + more for flying, more in zip(in_flight, waiting, strict=True)]
    memory = tuple(
        stage_memory(layer_costs.footprint(stage).divided(microbatches), units, schedule.versions(units))
        for stage, units in zip(stages, saved, strict=True)
    )
    sent_bytes = _sent_bytes(works, replicas, schedule, microbatches)
    worker_of = tuple(schedule.worker_of(stage, len(stages) // setting.chunks) for stage in range(len(stages)))
    return Price(seconds, bottleneck, tuple(in_flight), memory, sent_bytes, worker_of)


def _waiting(
    layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting, in_flight: Sequence[int]
) -> list[int]:
    """Under zb-h1, of how many microbatches a stage does the weights' part of the backward later.

    As many as bring it to what the first stage has in flight, if memory allows it: each keeps its saved activations and
    the gradients that have come for the weights, which are about as large.
    """
    waiting, microbatches = [], setting.microbatches
    for stage, flying in zip(stages, in_flight, strict=True):
        users = (t for t in layer_costs.traffic if t.producer in stage.before and stage.layers.intersection(t.users))
        more = 0
        if any(value.gradient_bytes for value in users):
            more = max(0, min(in_flight[0], -(-microbatches // stage.replicas)) - flying)
            if (limit := setting.cluster.memory_of(stage.kind)) is not None:
                fit = layer_costs.footprint(stage).divided(microbatches).most_in_flight(limit, stashing=False)
                more = max(0, min(more, (int(fit) - flying) // 2))
        waiting.append(more)
    return waiting


def _interleaved_model(stages: Sequence[Candidate], setting: Setting) -> InterleavedModel:
    replicas = {stage.replicas for stage in stages}
    assert len(replicas) == 1
    assert len(stages) % setting.chunks == 0
    return InterleavedModel(
        setting.schedule,
        link_of(setting.cluster),
        len(stages) // setting.chunks,
        setting.chunks,
        replicas.pop(),
        setting.microbatches,
    )


def _interleaved(works: Sequence[Work], model: InterleavedModel) -> list[dict[Resource, Floats]]:
    """Busy seconds of each worker's resources; workers go by the numbers of their first stages."""
    each = [StageSeconds.of(work, model) for work in works]
    columns = {name: np.array([getattr(stage, name) for stage in each]) for name in vars(each[0])}
    by_resource = model.worker_s(StageSeconds(**columns))
    return [{name: seconds[position] for name, seconds in by_resource.items()} for position in range(model.workers)]


def busy_resources(
    layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting
) -> list[dict[Resource, Floats]]:
    """Return the busy seconds per minibatch of every resource of every stage.

    Of synchronous schedules, that is their part of the maximum. With several chunks per worker there is one entry per
    worker, in the order of their first stages.
    """
    return _resources(layer_costs, stages, setting)[1]


def _resources(
    layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting
) -> tuple[list[float], list[dict[Resource, Floats]]]:
    """Per stage: its part of the sum of a schedule that drains, and the busy seconds of its resources."""
    cluster, schedule, microbatches = setting.cluster, setting.schedule, setting.microbatches
    works = [layer_costs.work(stage) for stage in stages]
    replicas = [stage.replicas for stage in stages]
    if schedule.chunked:
        return [], _interleaved(works, _interleaved_model(stages, setting))
    link = link_of(cluster)
    placement = None
    if places_matter(cluster, schedule):
        placement = Placement(Topology(cluster), works, replicas, exchanges(layer_costs, stages))
    if schedule.asynchronous:
        if placement is not None:
            return [], placement.asynchronous(setting.cost_model)
        asynchronous = asynchronous_model(setting.cost_model, schedule, microbatches, link)
        return [], [asynchronous.resources_s(work, r) for work, r in zip(works, replicas, strict=True)]
    synchronous = SynchronousModel(link, schedule, microbatches)
    if placement is not None:
        return placement.synchronous(synchronous)
    sums = [float(synchronous.sum_s(work, r)) for work, r in zip(works, replicas, strict=True)]
    return sums, [synchronous.resources_s(work, r) for work, r in zip(works, replicas, strict=True)]


def _busiest(stages: Sequence[dict[Resource, Floats]]) -> Bottleneck:
    """The first of the busiest resources; ties go to compute, which stands first in every model."""
    rank = {name: -index for index, name in enumerate(get_args(Resource))}
    stage, resource, busy_s = max(
        ((index, name, float(busy)) for index, stage in enumerate(stages) for name, busy in stage.items()),
        key=lambda item: (item[2], rank[item[1]], -item[0]),
    )
    match resource:
        case "compute":
            return Bottleneck(stage=stage, resource="compute", busy_s=busy_s)
        case "shared_link":
            return Bottleneck(stage=stage, resource="shared_link", busy_s=busy_s)
        case "receive" | "send":
            return Bottleneck(stage=stage, resource="link", busy_s=busy_s)
        case _:
            return Bottleneck(stage=stage - (resource == "cut_before"), resource="boundary", busy_s=busy_s)


def _sent_bytes(works: Sequence[Work], replicas: Sequence[int], schedule: Schedule, microbatches: int) -> float:
    """Bytes all workers send for one minibatch: transfers both ways, and the stages' all-reduces.

    A ring of r workers moves 2(r-1)·W in all, once per round of r minibatches under 1f1b and naive, once per minibatch
    where that is divided.
    """
    transfers = sum(float(work.sent_bytes) for work in works) * microbatches
    rings = [2 * (r - 1) * float(work.trainable_bytes) for work, r in zip(works, replicas, strict=True)]
    if schedule.divides:
        return transfers + sum(rings)
    return transfers + sum(ring / r for ring, r in zip(rings, replicas, strict=True))
