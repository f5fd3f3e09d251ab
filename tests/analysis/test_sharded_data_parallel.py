"""ZeRO priced: the paper's bytes, memory and times by hand, and what people's pipelines
look like.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.analysis.compare import compare
from planner.cost.candidate import Candidate, candidates
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.profile import Device, Profile
from planner.options.solving import ShardRule, SolveOptions
from planner.reporting.tables.answers import comparison_report
from planner.schedule.one_stage import FLUSH
from planner.solver import search_plan as solve
from planner.solver.alternatives.usual_ways import Way, usual_ways
from planner.solver.clock import Clock
from planner.solver.evaluate.evaluation import priced
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.request import Request
from planner.solver.tuning.record import STANDARD
from tests.samples import layer, profile

GPUS = 4
SIZE = 400 * 10**6  # bytes of weights: several buckets of gradients
LAYERS = [
    layer(
        f"h.{n}", 1, 2, output_bytes=10, weight_bytes=SIZE // 8, update_s=0.5, saved_bytes=100
    ).model_copy(update={"optimizer_bytes": SIZE // 4})
    for n in range(8)
]
ON_CPUS = profile(*LAYERS)
MODEL = ON_CPUS.model_copy(update={"device": Device(kind="cuda", name="imagined")})
# an all-reduce takes 6 s, beside 8 s of forward and 16 s of backward
SLOW = flat_cluster(GPUS, 1e8)


def problem(microbatches: int, cluster: Cluster = SLOW, model: Profile = MODEL) -> Problem:
    options = SolveOptions(schedule=FLUSH, microbatches=microbatches)
    return Request(model, cluster, options, Clock()).problem(Budget.unlimited())


def everywhere(gpus: int) -> list[Candidate]:
    return candidates([range(len(LAYERS))], [gpus])


def zero(level: int, microbatches: int) -> Evaluation:
    return at_level(problem(microbatches), level)


def at_level(asked: Problem, level: int) -> Evaluation:
    (stage,) = everywhere(GPUS)
    return priced(asked, [replace(stage, options=replace(stage.options, level=level))])


def plain(microbatches: int) -> Evaluation:
    asked = problem(microbatches)
    return priced(asked, everywhere(GPUS))


def test_stage_2_sends_what_data_parallelism_sends_and_stage_3_half_as_much_again() -> None:
    sent = plain(GPUS).price.communication_bytes
    assert sent == 2 * (GPUS - 1) * SIZE
    assert zero(2, GPUS).price.communication_bytes == sent
    assert zero(3, GPUS).price.communication_bytes == 1.5 * sent


def test_gradients_and_weights_move_for_every_microbatch() -> None:
    once = (GPUS - 1) * SIZE
    assert zero(2, 3 * GPUS).price.communication_bytes == (3 + 1) * once
    assert zero(3, 3 * GPUS).price.communication_bytes == 9 * once


def test_each_gpu_holds_its_share_of_the_state() -> None:
    whole, second, third = (
        each.price.memory[0] for each in (plain(GPUS), zero(2, GPUS), zero(3, GPUS))
    )
    assert second.optimizer_bytes == third.optimizer_bytes == whole.optimizer_bytes // GPUS
    # Of `fully_shard`, which keeps the parts beside the gathered weights: of all blocks, or of two.
    assert second.weights_bytes == SIZE // GPUS + SIZE
    assert third.weights_bytes == SIZE // GPUS + 2 * SIZE // 8
    # A block's gradients, and what sends them.
    assert (
        second.gradients_bytes
        == third.gradients_bytes
        == whole.gradients_bytes // GPUS + 2 * SIZE // 8
    )
    assert second.activations_bytes == third.activations_bytes == whole.activations_bytes


def test_times_by_hand() -> None:
    half_s = (GPUS - 1) / GPUS * SIZE / 1e8  # 3 s
    update_s = 8 * 0.5 / GPUS
    # All of a backward's buckets but the last, that of the first of eight layers, are reduced
    # beside it. A forward waits for the first of six equal parts of the weights, as in the cost
    # model.
    last_s, first_s = half_s / 8, half_s / 6
    assert zero(2, GPUS).seconds == pytest.approx(8 + 16 + last_s + update_s + half_s)
    assert zero(3, GPUS).seconds == pytest.approx(8 + first_s + 16 + 2 * last_s + update_s)


def test_without_overlap_all_exchanges_are_waited_for() -> None:
    asked = problem(GPUS, flat_cluster(GPUS, 1e8, overlap=False))
    found = at_level(asked, 3)
    assert found.seconds == pytest.approx(24 + 3 * 3 + 1)


def test_on_cpus_nothing_overlaps() -> None:
    half_s, asked = 3.0, problem(GPUS, model=ON_CPUS)
    # Where nobody has measured what sums and gathers take between computations, each takes half an
    # all-reduce.
    assert at_level(asked, 2).seconds == pytest.approx(24 + half_s + half_s + 1)
    assert at_level(asked, 3).seconds == pytest.approx(24 + half_s + 2 * half_s + 1)


def test_stage_2_of_one_microbatch_is_a_stage_whose_optimizer_is_sharded() -> None:
    """It sends and waits for the same; the cost of such stages is an independent program."""
    asked = problem(GPUS)
    (stage,) = everywhere(GPUS)
    sharded = priced(asked, [replace(stage, options=replace(stage.options, level=1))])
    assert zero(2, GPUS).seconds == pytest.approx(sharded.seconds, rel=0.02)


def ways_on(model: Profile, cluster: Cluster) -> list[Way]:
    request = Request(model, cluster, SolveOptions(), Clock())
    return list(usual_ways(request, request.unlimited_budget()))


def names(model: Profile, cluster: Cluster) -> list[str]:
    return [way.name for way in ways_on(model, cluster)]


def test_equal_stages_are_those_that_divide_the_gpus() -> None:
    replicated = ["data parallel", "one GPU", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP"]
    assert names(MODEL, flat_cluster(8, 1e8)) == [
        *replicated,
        "2 equal stages",
        "4 equal stages",
        "8 equal stages",
    ]
    assert names(MODEL, flat_cluster(6, 1e8)) == [*replicated, "2 equal stages", "6 equal stages"]
    assert names(MODEL, flat_cluster(1, 1e8)) == ["data parallel", "one GPU"]
    deepest = ways_on(MODEL, flat_cluster(16, 1e8))[-1]
    assert [(len(stage.layers), stage.replicas) for stage in deepest.plan.stages] == [(1, 2)] * 8


def test_where_data_parallelism_does_not_fit_another_way_is_the_measure() -> None:
    comparison = compare(ON_CPUS, solve(ON_CPUS, flat_cluster(GPUS, 1e8, 900 * 10**6)))
    rows = {row.name: row for row in comparison.rows}
    assert rows["data parallel"].over_memory_bytes > 0
    assert comparison.over is not None
    assert rows[comparison.over].over_memory_bytes == 0
    assert rows[comparison.over].speedup == 1
    assert f"speed-up: over {comparison.over}; sent vs DP" in comparison_report(comparison)
    over_chosen = (
        rows[comparison.over].seconds_per_microbatch / comparison.rows[0].seconds_per_microbatch
    )
    assert comparison.rows[0].speedup == pytest.approx(over_chosen)


def test_what_is_as_fast_is_divided_as_little_as_can_be() -> None:
    """Where no memory asks for it, nobody divides weights for a thousandth of the time."""
    layers = tuple(each.model_copy(update={"update_s": 0.001}) for each in LAYERS)
    known = MODEL.model_copy(update={"layers": layers, "optimizer_elementwise": True})
    asked = problem(GPUS, flat_cluster(GPUS, 1e10), known)
    seconds = [at_level(asked, level).seconds for level in range(4)]
    assert (
        min(seconds[2:]) < seconds[0] < min(seconds) * (1 + STANDARD.answer.indistinguishable_share)
    )
    rules: dict[ShardRule, set[int]] = {"auto": {0}, "always": {1, 2, 3}}
    for rule, levels in rules.items():
        plan = solve(known, asked.cluster, schedule=FLUSH, microbatches=GPUS, shard_optimizer=rule)
        assert plan.config == "4"
        assert plan.stages[0].level in levels
