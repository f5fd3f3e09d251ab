"""The price of a plan: seconds per minibatch, bottleneck, memory and bytes sent, from the formulas of `cost`.

Written from the definitions, stage by stage, with sets: slow, plain, and the reference that the search is held to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from planner.cluster import Cluster, Kind
from planner.cost import ASYNCHRONOUS, DIVIDED, Link, Resource, check_combination, link_of
from planner.cost_2bw import VERSIONS, asynchronous_model
from planner.cost_drained import SynchronousModel
from planner.cost_interleaved import InterleavedModel, StageSeconds
from planner.placement import Placement, places_matter
from planner.plan_file import Bottleneck, CostModelName, ScheduleName, StageMemory
from planner.profile_file import Layer, Profile
from planner.topology import Topology
from planner.work import POSTED, Floats, Footprint, Work, in_flight_1f1b, working_bytes


@dataclass(frozen=True)
class Traffic:
    """A value, the layer that makes it and the layers that use it, by position."""

    name: str
    producer: int
    users: tuple[int, ...]  # ascending
    output_bytes: int
    gradient_bytes: int

    @property
    def amounts(self) -> Floats:
        """What it adds to a cut that it crosses: bytes of activations and of gradients, and how many of each."""
        return np.array([self.output_bytes, self.gradient_bytes, 1, self.gradient_bytes > 0], dtype=np.float64)


@dataclass(frozen=True)
class Candidate:
    """A stage to be priced: positions of its layers, and of all layers in the stages before it.

    `recompute`: it keeps only its input for the backward, and runs its forward again for the rest.
    `kind`: of its devices, where the cluster has several. `ranks`: of its devices; consecutive ones when empty.
    """

    before: frozenset[int]
    layers: frozenset[int]
    replicas: int
    recompute: bool = False
    kind: Kind | None = None
    ranks: tuple[int, ...] = ()


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


class Ledger:
    """A profile's layers as numbers, and the work and footprint of any set of layers."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.position = {layer.name: index for index, layer in enumerate(profile.layers)}
        self._works: dict[tuple[frozenset[int], frozenset[int]], Work] = {}
        self._footprints: dict[tuple[frozenset[int], frozenset[int]], Footprint] = {}

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Every value that some layer uses."""
        users: dict[tuple[str, str], set[int]] = {}
        for edge in self.profile.edges:
            users.setdefault((edge.source, edge.value), set()).add(self.position[edge.target])
        return tuple(
            Traffic(value.name, index, tuple(sorted(used)), value.output_bytes, value.gradient_bytes)
            for index, layer in enumerate(self.profile.layers)
            for value in layer.outputs
            if (used := users.get((layer.name, value.name)))
        )

    def work(self, stage: Candidate) -> Work:
        """The stage's work for one microbatch."""
        key = stage.before, stage.layers
        if key not in self._works:
            self._works[key] = self._work(stage)
        work = self._works[key] if stage.kind is None else self._works[key].at_speed(stage.kind.speed)
        return work.recomputed() if stage.recompute else work

    def _work(self, stage: Candidate) -> Work:
        layers = [self.profile.layers[index] for index in sorted(stage.layers)]
        done = stage.before | stage.layers
        arriving = [t for t in self.traffic if t.producer in stage.before and stage.layers.intersection(t.users)]
        leaving = [t for t in self.traffic if stage.layers.intersection((t.producer, *t.users)) and set(t.users) - done]
        return Work(
            forward_s=np.float64(sum(layer.forward_s for layer in layers)),
            backward_s=np.float64(sum(layer.backward_s for layer in layers)),
            update_s=np.float64(sum(layer.update_s for layer in layers)),
            accumulate_s=np.float64(sum(layer.accumulate_s for layer in layers)),
            trainable_bytes=np.float64(sum(layer.gradient_bytes for layer in layers)),
            received_bytes=np.float64(_outputs(arriving) + _gradients(leaving)),
            sent_bytes=np.float64(_outputs(leaving) + _gradients(arriving)),
            received_messages=np.float64(len(arriving) + _with_gradient(leaving)),
            sent_messages=np.float64(len(leaving) + _with_gradient(arriving)),
            cut_before_bytes=np.float64(_outputs(self.crossing(stage.before))),
            cut_after_bytes=np.float64(_outputs(self.crossing(done))),
            is_first=np.asarray(not stage.before),
            input_bytes=np.float64(_outputs(arriving)),
        )

    @cached_property
    def at_work(self) -> Floats | None:
        """Each layer's saved bytes, gradients, workspace and that of its update; None where these are not known.

        Stages of a model that was captured have their layers in the profile's order, of others in any.
        """
        layers = self.profile.layers
        if self.profile.graph_hash is None or not any(layer.workspace_bytes for layer in layers):
            return None
        names = ("saved_bytes", "gradient_bytes", "workspace_bytes", "update_workspace_bytes")
        return np.array([[getattr(layer, name) for layer in layers] for name in names], dtype=np.float64)

    def crossing(self, done: frozenset[int]) -> list[Traffic]:
        """Values made by the layers `done` and used by others."""
        return [t for t in self.traffic if t.producer in done and set(t.users) - done]

    def moved(self, layers: frozenset[int]) -> list[Traffic]:
        """Values that enter or leave these layers, whichever layers they are; each once."""
        leaving = [t for t in self.traffic if t.producer in layers and set(t.users) - layers]
        return leaving + [t for t in self.traffic if t.producer not in layers and layers.intersection(t.users)]

    def footprint(self, stage: Candidate) -> Footprint:
        """The stage's bytes."""
        key = stage.before, stage.layers
        if key not in self._footprints:
            self._footprints[key] = self._footprint(stage)
        return self._footprints[key].recomputed() if stage.recompute else self._footprints[key]

    def _footprint(self, stage: Candidate) -> Footprint:
        layers = [self.profile.layers[index] for index in stage.layers]
        work = self.work(stage)
        working = accumulating = np.asarray(0.0)
        if (known := self.at_work) is not None:
            working, accumulating = (each[-1] for each in working_bytes(*known[:, sorted(stage.layers)]))
        return Footprint(
            weight_bytes=np.float64(sum(layer.weight_bytes for layer in layers)),
            gradient_bytes=np.float64(sum(layer.gradient_bytes for layer in layers)),
            optimizer_bytes=np.float64(sum(layer.optimizer_bytes for layer in layers)),
            buffer_bytes=np.float64(sum(layer.buffer_bytes for layer in layers)),
            saved_bytes=np.float64(sum(layer.saved_bytes for layer in layers)),
            message_bytes=work.received_bytes + work.sent_bytes,
            input_bytes=work.input_bytes,
            working_bytes=working,
            accumulating_bytes=accumulating,
        )


def exchanges(ledger: Ledger, stages: Sequence[Candidate]) -> dict[tuple[int, int], Floats]:
    """What pairs of stages exchange: bytes of activations and of gradients, and how many of each."""
    return {
        ends: np.sum([value.amounts for value in values], axis=0) for ends, values in messages(ledger, stages).items()
    }


def messages(
    ledger: Ledger, stages: Sequence[Candidate], *, contiguous: bool = True
) -> dict[tuple[int, int], list[Traffic]]:
    """The values that each pair of stages exchanges: each goes from its producer to its first user, and on to the next.

    Where stages are not contiguous, it goes from its producer to each.
    """
    stage_of = {layer: number for number, stage in enumerate(stages) for layer in stage.layers}
    found: dict[tuple[int, int], list[Traffic]] = {}
    for value in ledger.traffic:
        producer, users = stage_of[value.producer], {stage_of[user] for user in value.users}
        route = (
            pairwise(sorted({producer, *users})) if contiguous else ((producer, user) for user in users - {producer})
        )
        for ends in route:
            found.setdefault(ends, []).append(value)
    return found


def candidates(groups: Sequence[Sequence[int]], replicas: Sequence[int]) -> list[Candidate]:
    """Stages from the positions of their layers."""
    before: frozenset[int] = frozenset()
    stages = []
    for layers, r in zip(groups, replicas, strict=True):
        stages.append(Candidate(before, frozenset(layers), r))
        before |= frozenset(layers)
    return stages


def price(
    ledger: Ledger,
    stages: Sequence[Candidate],
    cluster: Cluster,
    *,
    model: CostModelName = "resource",
    schedule: ScheduleName = "1f1b",
    microbatches: int = 1,
    chunks: int = 1,
) -> Price:
    """Price a whole plan. A minibatch is `microbatches` microbatches of the profile's size.

    Under `interleaved` each worker has `chunks` of the stages, which must be a multiple and all have as many replicas.

    Raises:
        InputError: for a cost model and schedule that do not go together.
    """
    check_combination(model, schedule, microbatches, chunks)
    if model == "max-load":
        return _price_loads(ledger, stages, link_of(cluster))
    works = [ledger.work(stage) for stage in stages]
    replicas = [stage.replicas for stage in stages]
    sums, busy = _resources(ledger, stages, cluster, model, schedule, microbatches, chunks)
    bottleneck = _busiest(busy)
    seconds = bottleneck.busy_s
    in_flight: list[int]
    if schedule in ASYNCHRONOUS:
        in_flight = [int(in_flight_1f1b(r, sum(replicas[s + 1 :]))) for s, r in enumerate(replicas)]
    elif schedule == "interleaved":
        in_flight = list(_interleaved_model(stages, cluster, microbatches, chunks).in_flight())
    else:
        synchronous = SynchronousModel(link_of(cluster), schedule, microbatches)
        seconds += sum(sums)
        slowest = max(range(len(sums)), key=sums.__getitem__)
        if bottleneck.busy_s <= 0:
            bottleneck = Bottleneck(stage=slowest, resource="compute", busy_s=sums[slowest])
        in_flight = [int(synchronous.in_flight(r, sum(replicas[s + 1 :]))) for s, r in enumerate(replicas)]
    saved = in_flight
    if schedule == "zb-h1":
        waiting = _waiting(ledger, stages, cluster, in_flight, microbatches)
        saved = [flying + 2 * more for flying, more in zip(in_flight, waiting, strict=True)]
        in_flight = [flying + more for flying, more in zip(in_flight, waiting, strict=True)]
    memory = tuple(
        stage_memory(ledger.footprint(stage).divided(microbatches), units, versions_of(schedule, units))
        for stage, units in zip(stages, saved, strict=True)
    )
    sent_bytes = _sent_bytes(works, replicas, schedule, microbatches)
    return Price(seconds, bottleneck, tuple(in_flight), memory, sent_bytes, chunks)


def _waiting(
    ledger: Ledger, stages: Sequence[Candidate], cluster: Cluster, in_flight: Sequence[int], microbatches: int
) -> list[int]:
    """Under zb-h1, of how many microbatches a stage does the weights' part of the backward later.

    As many as bring it to what the first stage has in flight, if memory allows it: each keeps its saved activations and
    the gradients that have come for the weights, which are about as large.
    """
    waiting = []
    for stage, flying in zip(stages, in_flight, strict=True):
        users = (t for t in ledger.traffic if t.producer in stage.before and stage.layers.intersection(t.users))
        more = 0
        if any(value.gradient_bytes for value in users):
            more = max(0, min(in_flight[0], -(-microbatches // stage.replicas)) - flying)
            if (limit := cluster.memory_of(stage.kind)) is not None:
                fit = ledger.footprint(stage).divided(microbatches).most_in_flight(limit, stashing=False)
                more = max(0, min(more, (int(fit) - flying) // 2))
        waiting.append(more)
    return waiting


def _interleaved_model(
    stages: Sequence[Candidate], cluster: Cluster, microbatches: int, chunks: int
) -> InterleavedModel:
    replicas = {stage.replicas for stage in stages}
    assert len(replicas) == 1
    assert len(stages) % chunks == 0
    return InterleavedModel(link_of(cluster), len(stages) // chunks, chunks, replicas.pop(), microbatches)


def _interleaved(works: Sequence[Work], model: InterleavedModel) -> list[dict[Resource, Floats]]:
    """Busy seconds of each worker's resources; workers go by the numbers of their first stages."""
    each = [StageSeconds.of(work, model.replicas, model.link) for work in works]
    columns = {name: np.array([getattr(stage, name) for stage in each]) for name in vars(each[0])}
    by_resource = model.worker_s(StageSeconds(**columns))
    return [{name: seconds[position] for name, seconds in by_resource.items()} for position in range(model.workers)]


def busy_resources(
    ledger: Ledger,
    stages: Sequence[Candidate],
    cluster: Cluster,
    *,
    model: CostModelName = "resource",
    schedule: ScheduleName = "1f1b",
    microbatches: int = 1,
    chunks: int = 1,
) -> list[dict[Resource, Floats]]:
    """Busy seconds per minibatch of every resource of every stage; of schedules that drain, their part of the maximum.

    Under `interleaved` of every worker, by the number of its first stage.

    Raises:
        InputError: for a cost model and schedule that do not go together.
    """
    check_combination(model, schedule, microbatches, chunks)
    return _resources(ledger, stages, cluster, model, schedule, microbatches, chunks)[1]


def _resources(
    ledger: Ledger,
    stages: Sequence[Candidate],
    cluster: Cluster,
    model: CostModelName,
    schedule: ScheduleName,
    microbatches: int,
    chunks: int,
) -> tuple[list[float], list[dict[Resource, Floats]]]:
    """Per stage: its part of the sum of a schedule that drains, and the busy seconds of its resources."""
    works = [ledger.work(stage) for stage in stages]
    replicas = [stage.replicas for stage in stages]
    if schedule == "interleaved":
        return [], _interleaved(works, _interleaved_model(stages, cluster, microbatches, chunks))
    link = link_of(cluster)
    placement = None
    if places_matter(cluster, schedule):
        placement = Placement(Topology(cluster), works, replicas, exchanges(ledger, stages))
    if schedule in ASYNCHRONOUS:
        if placement is not None:
            return [], placement.asynchronous(model)
        asynchronous = asynchronous_model(model, schedule, microbatches, link)
        return [], [asynchronous.resources_s(work, r) for work, r in zip(works, replicas, strict=True)]
    synchronous = SynchronousModel(link, schedule, microbatches)
    if placement is not None:
        return placement.synchronous(synchronous)
    sums = [float(synchronous.sum_s(work, r)) for work, r in zip(works, replicas, strict=True)]
    return sums, [synchronous.resources_s(work, r) for work, r in zip(works, replicas, strict=True)]


def _price_loads(ledger: Ledger, stages: Sequence[Candidate], link: Link) -> Price:
    """The price under `max-load`: every stage holds what it holds once."""
    bottleneck, memory, crossing_bytes = Bottleneck(stage=0, resource="compute", busy_s=0.0), [], 0
    for number, stage in enumerate(stages):
        moved = ledger.moved(stage.layers)
        free = stage.kind is not None and not stage.kind.pays_transfers
        moved_s = 0.0 if free else sum(value_load_s(value, link) for value in moved)
        moved_bytes = sum(value.output_bytes + value.gradient_bytes for value in moved)
        compute_s = float(ledger.work(stage).compute_s)
        if moved_s + compute_s > bottleneck.busy_s:
            resource: Literal["compute", "link"] = "compute" if compute_s >= moved_s else "link"
            bottleneck = Bottleneck(stage=number, resource=resource, busy_s=moved_s + compute_s)
        held = ledger.footprint(stage)
        footprint = replace(held, message_bytes=np.float64(moved_bytes), working_bytes=np.asarray(0.0))
        memory.append(stage_memory(footprint, 1, 1))
        crossing_bytes += sum(
            value.output_bytes + value.gradient_bytes for value in moved if value.producer not in stage.layers
        )
    return Price(bottleneck.busy_s, bottleneck, (1,) * len(stages), tuple(memory), float(crossing_bytes))


def held_bytes(layer: Layer) -> int:
    """What a layer adds to its device's memory under `max-load`."""
    fixed = layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes + layer.buffer_bytes
    return fixed + layer.saved_bytes


def value_load_s(value: Traffic, link: Link) -> float:
    """Seconds that a value, with its gradient, adds to the load of each device that it leaves or enters."""
    messages = 1 + (value.gradient_bytes > 0)
    return (value.output_bytes + value.gradient_bytes) / link.bandwidth_bytes_per_s + messages * link.latency_s


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


def _sent_bytes(works: Sequence[Work], replicas: Sequence[int], schedule: ScheduleName, microbatches: int) -> float:
    """Bytes all workers send for one minibatch: transfers both ways, and the stages' all-reduces.

    A ring of r workers moves 2(r-1)·W in all, once per round of r minibatches under 1f1b and naive, once per minibatch
    where that is divided.
    """
    transfers = sum(float(work.sent_bytes) for work in works) * microbatches
    rings = [2 * (r - 1) * float(work.trainable_bytes) for work, r in zip(works, replicas, strict=True)]
    if schedule in DIVIDED:
        return transfers + sum(rings)
    return transfers + sum(ring / r for ring, r in zip(rings, replicas, strict=True))


def _outputs(values: Sequence[Traffic]) -> int:
    return sum(value.output_bytes for value in values)


def _gradients(values: Sequence[Traffic]) -> int:
    return sum(value.gradient_bytes for value in values)


def _with_gradient(values: Sequence[Traffic]) -> int:
    return sum(value.gradient_bytes > 0 for value in values)
