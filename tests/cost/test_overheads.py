"""What workers take beside tensors: counted as the executor makes it, and kept free."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.candidate import StageOptions, candidates
from planner.cost.communicators import communicators
from planner.cost.layer_costs import LayerCosts
from planner.cost.overheads import COMMUNICATOR_BYTES, CONTEXT_BYTES, FRAGMENTED, Overheads, Reserve
from planner.cost.setting import Setting
from planner.executor.communication.links import lanes_of
from planner.executor.run.loop import all_streams
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Device, Profile
from planner.plan.shape import shape_of
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from tests.samples import layer, profile

MB = 10**6


def on_cuda(model: Profile, context_bytes: int | None = None) -> Profile:
    """The profile of a GPU."""
    return model.model_copy(
        update={"device": Device(kind="cuda", name="imagined", context_bytes=context_bytes)}
    )


def plan_of(
    model: Profile, replicas: tuple[int, ...], schedule: str, microbatches: int, chunks: int = 1
) -> Plan:
    """A plan with one layer per stage."""
    layer_costs, stages = (
        LayerCosts(model),
        candidates([[index] for index in range(len(replicas))], replicas),
    )
    cluster = flat_cluster(sum(replicas) // chunks, 1e9)
    problem = Problem(layer_costs, Setting(cluster, find(schedule), microbatches, chunks))
    return assemble(problem, Evaluation(tuple(stages), problem.price(stages)))


def chain(layers: int) -> Profile:
    return on_cuda(
        profile(*(layer(f"l{index}", output_bytes=8, weight_bytes=MB) for index in range(layers)))
    )


@pytest.mark.parametrize(
    ("schedule", "replicas", "microbatches", "chunks"),
    [
        ("1f1b", (1,), 1, 1),
        ("1f1b", (7, 1), 1, 1),
        ("1f1b", (2, 3, 1), 1, 1),
        ("1f1b", (4, 2), 1, 1),
        ("1f1b-flush", (2, 2, 2), 8, 1),
        ("interleaved", (1, 1, 1, 1), 4, 2),
        ("interleaved", (1, 1, 1, 1, 1, 1), 4, 2),
    ],
)
def test_communicators_are_as_many_as_the_executor_makes(
    schedule: str, replicas: tuple[int, ...], microbatches: int, chunks: int
) -> None:
    model = chain(len(replicas))
    plan = plan_of(model, replicas, schedule, microbatches, chunks)
    counts = communicators(
        LayerCosts(model), candidates([[index] for index in range(len(replicas))], replicas)
    )
    made = Counter(
        rank
        for lane in lanes_of(all_streams(shape_of(plan)))
        for rank in (lane.sender, lane.receiver)
    )
    made.update(rank for stage in plan.stages if stage.replicas > 1 for rank in stage.ranks)
    for rank in {rank for stage in plan.stages for rank in stage.ranks}:
        assert (
            sum(
                count
                for count, stage in zip(counts, plan.stages, strict=True)
                if rank in stage.ranks
            )
            == made[rank]
        )


def test_a_skip_connection_has_communicators_of_its_own() -> None:
    layers = [layer(f"l{index}", output_bytes=8) for index in range(3)]
    model = profile(*layers, edges=[("l0", "l1"), ("l1", "l2"), ("l0", "l2")])
    stages = candidates([[0], [1], [2]], (1, 1, 1))
    # The value travels along the stages, so it needs no communicator between the first and the
    # last.
    assert communicators(LayerCosts(model), stages) == [2, 4, 2]


def test_ranks_that_divide_layers_have_a_communicator_for_it() -> None:
    divided = [StageOptions(tensor=2), StageOptions(2, tensor=2)]
    plain = candidates([[0], [1]], (1, 2))
    stages = [
        replace(stage, options=options) for stage, options in zip(plain, divided, strict=True)
    ]
    assert communicators(LayerCosts(chain(2)), plain) == [4, 1 + 2]
    assert communicators(LayerCosts(chain(2)), stages) == [1 + 4, 1 + 1 + 2]


def test_a_stages_memory_has_its_overheads() -> None:
    plan = plan_of(chain(2), (7, 1), "1f1b", 1)
    for stage, count in zip(plan.stages, (3, 14), strict=True):
        fragments = int(stage.memory.tensor_bytes * FRAGMENTED)
        assert stage.memory.overhead_bytes == CONTEXT_BYTES + count * COMMUNICATOR_BYTES + fragments
    chunked = plan_of(chain(4), (1, 1, 1, 1), "interleaved", 4, 2)
    worker = [stage.memory.overhead_bytes for stage in chunked.stages if stage.ranks == (0,)]
    fragments = sum(
        int(stage.memory.tensor_bytes * FRAGMENTED)
        for stage in chunked.stages
        if stage.ranks == (0,)
    )
    # one context for both chunks
    assert sum(worker) == CONTEXT_BYTES + 6 * COMMUNICATOR_BYTES + fragments


def test_a_measured_context_counts_and_a_cpu_has_none() -> None:
    measured = on_cuda(chain(1), context_bytes=300 * MB)
    overheads = Overheads.of(measured.device)
    assert overheads is not None
    assert overheads.reserve(2).fixed_bytes == 300 * MB + 2 * COMMUNICATOR_BYTES
    on_cpu = profile(layer("l0", weight_bytes=MB))
    plan = plan_of(on_cpu, (1,), "1f1b", 1)
    assert plan.stages[0].memory.overhead_bytes == 0


def test_files_without_overheads_stay_as_they_were() -> None:
    plan = plan_of(profile(layer("l0", weight_bytes=MB)), (1,), "1f1b", 1)
    text = plan.model_dump_json()
    assert "overhead_bytes" not in text
    assert "context_bytes" not in text
    assert Plan.model_validate_json(text) == plan
    with_them = plan_of(on_cuda(chain(1), 5), (1,), "1f1b", 1)
    assert "overhead_bytes" in with_them.model_dump_json()
    assert '"context_bytes":5' in with_them.model_dump_json()
    assert Plan.model_validate_json(with_them.model_dump_json()) == with_them


@given(st.integers(1, 10**13), st.integers(0, 10**9), st.floats(0, 1))
def test_what_has_room_fits_and_a_little_more_does_not(
    memory: int, fixed: int, share: float
) -> None:
    reserve = Reserve(fixed, share)
    room = reserve.room(memory)
    if room > 1:
        assert reserve.whole(room) <= memory
    assert (
        reserve.whole(room + 1 + math.ceil(1e-12 * memory))
        >= min(memory, reserve.whole(room)) + share
    )
    assert replace(reserve, share=0.0).room(memory) == max(1, memory - fixed)
