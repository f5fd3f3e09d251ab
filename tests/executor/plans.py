"""Profiles with made-up times, and plans with a given cut that no solver would choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.plan_parts import config_of
from planner.formats.profile import Compiled, Device, Edge, Layer, Profile, Provenance, Value
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import ValueSpec
from planner.model.capture.size import Extent
from planner.model.lengths import extent_of
from planner.model.options import PLAIN, ModuleOptions, autocast_name
from planner.model.spec import load_model_file
from planner.plan.rank_groups import on_ranks
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation

_OF_COMPILED = [name for name in Compiled.model_fields if name != "runs"]


_known: dict[tuple[str, str, int, ModuleOptions], Profile] = {}


def structural_profile(path: Path, batch_size: int, options: ModuleOptions = PLAIN) -> Profile:
    """Profile the layers, values and edges of a model file; all layers take the same time.

    The same file is captured once, whichever test wrote it: captures took a third of many tests.
    """
    key = (path.stem, path.read_text(encoding="utf-8"), batch_size, options)
    if key not in _known:
        _known[key] = _capture(path, batch_size, options)
    return _known[key]


def _capture(path: Path, batch_size: int, options: ModuleOptions) -> Profile:
    training_spec = load_model_file(str(path))
    batch = training_spec.example_batch(batch_size)
    graph = capture_file(training_spec, batch, options=options)
    sizes = {name: 4 * parameter.numel() for name, parameter in graph.model.named_parameters()}
    outputs: dict[int, list[Value]] = {}
    for node in graph.crossing:
        outputs.setdefault(graph.owner[node], []).append(
            _value(graph.specs[node], extent_of(batch, graph.lengths))
        )
    layers = []
    for index, layer in enumerate(graph.layers):
        weight_bytes = sum(sizes[name] for name in layer.parameters)
        layers.append(
            Layer(
                name=layer.name,
                op=layer.op,
                forward_s=1e-3,
                backward_s=2e-3,
                update_s=1e-4,
                outputs=tuple(outputs.get(index, ())),
                weight_bytes=weight_bytes,
                gradient_bytes=weight_bytes,
                parameters=layer.parameters,
            )
        )
    return Profile(
        model=training_spec.name,
        graph_hash=graph.hash,
        autocast=autocast_name(options.autocast),
        master_weights=autocast_name(options.half),
        memory_format="channels-last" if options.channels_last else None,
        compiled=Compiled(**dict.fromkeys(_OF_COMPILED, 0.0), runs=())
        if options.compiled
        else None,
        device=Device(kind="cpu", name="any", threads=1),
        dtype="float32",
        microbatch_size=batch_size,
        layers=tuple(layers),
        edges=tuple(
            Edge(source=edge.source, value=edge.value, target=edge.target) for edge in graph.edges
        ),
        provenance=Provenance(tool="test", source="estimated"),
    )


def _value(spec: ValueSpec, extent: Extent) -> Value:
    size = math.prod(spec.shape(extent)) * spec.dtype.itemsize
    return Value(
        name=spec.name, output_bytes=size, gradient_bytes=size if spec.requires_grad else 0
    )


def make_plan(
    profile: Profile,
    replicas: Sequence[int],
    schedule: str = "1f1b",
    microbatches: int = 1,
    depths: Sequence[int] | None = None,
    chunks: int = 1,
) -> Plan:
    """The plan with `replicas` per stage of equally many layers; `depths` in flight, or what the
    schedule has.

    With several `chunks` each worker has so many of the stages.
    """
    layers = len(profile.layers)
    cuts = [layers * stage // len(replicas) for stage in range(1, len(replicas))]
    groups = [list(range(start, end)) for start, end in pairwise([0, *cuts, layers])]
    layer_costs = LayerCosts(profile)
    cluster = flat_cluster(sum(replicas) // chunks, 1e9)
    stages = candidates(groups, replicas)
    problem = Problem(layer_costs, Setting(cluster, find(schedule), microbatches, chunks))
    cost = problem.price(stages)
    if depths is not None:
        cost = replace(cost, in_flight=tuple(depths))
    chosen = Evaluation(tuple(stages), cost)
    return assemble(problem, chosen)


def in_groups(plan: Plan, *degrees: int) -> Plan:
    """The plan with so many ranks for each of its own, which divide its layers; several degrees are
    by stage.
    """
    each = degrees * len(plan.stages) if len(degrees) == 1 else degrees
    groups = [tuple(stage.ranks) for stage in plan.stages]
    ranks = on_ranks(groups, each)
    stages = [
        stage.model_copy(update={"tensor": degree, "ranks": own})
        for stage, degree, own in zip(plan.stages, each, ranks, strict=True)
    ]
    cluster = flat_cluster(len({rank for own in ranks for rank in own}), 1e9)
    config = config_of(plan.replicas, plan.chunks, tuple(each))
    return plan.model_copy(update={"stages": tuple(stages), "cluster": cluster, "config": config})


def by_tokens(plan: Plan) -> Plan:
    """The plan with sequence parallelism."""
    return plan.model_copy(
        update={"cluster": plan.cluster.model_copy(update={"sequence_parallel": True})}
    )


def by_sequences(plan: Plan, ranks: int) -> Plan:
    """The plan with so many ranks for each of its own, which divide sequences."""
    return in_groups(plan, ranks).model_copy(update={"context": ranks})


def sharded(plan: Plan, level: int = 1, group: int | None = None) -> Plan:
    """The plan whose replicated stages divide the optimizer, or more, over their replicas."""
    stages = [
        stage.model_copy(
            update={"sharded": stage.replicas > 1, "sharding_level": level, "shard_group": group}
        )
        for stage in plan.stages
    ]
    return plan.model_copy(update={"stages": tuple(stages)})


def scattered(plan: Plan) -> Plan:
    """The plan on ranks in another order: odd ones before even ones, from the last to the first."""
    order = [*reversed(range(1, plan.workers, 2)), *reversed(range(0, plan.workers, 2))]
    stages = [
        stage.model_copy(update={"ranks": tuple(order[rank] for rank in stage.ranks)})
        for stage in plan.stages
    ]
    return plan.model_copy(update={"stages": tuple(stages)})
