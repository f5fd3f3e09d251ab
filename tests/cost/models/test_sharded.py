"""Sharded optimizer state in every cost model: by hand, and against the simulation where links are
otherwise free.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.candidate import Candidate, StageOptions, candidates, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.asynchronous import AsynchronousModel, DoubleBufferedModel
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.schedule.registry import find
from planner.schedule.schedule import Schedule
from planner.simulator.simulate_plan import costs_of, simulate, simulated_s
from planner.solver.assemble import assemble
from planner.solver.evaluate.pipelines import pipeline_for
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from tests.cost.works import EXAMPLE
from tests.samples import layer, profile

LAYERS = [layer(f"h.{n}", 1, 2, weight_bytes=120, update_s=0.6, saved_bytes=8) for n in range(6)]
MODEL = profile(*(each.model_copy(update={"optimizer_bytes": 241}) for each in LAYERS))
MB = 10**6
SHARDED = EXAMPLE.shared_out()


def problem_of(model: Profile, cluster: Cluster, schedule: str, microbatches: int = 1) -> Problem:
    return Problem(LayerCosts(model), Setting(cluster, find(schedule), microbatches))


def whole(replicas: int, *, sharded: bool = True, recompute: bool = False) -> Candidate:
    layers = frozenset(range(len(MODEL.layers)))
    return Candidate(
        frozenset(), layers, StageOptions(replicas, sharded, whole_stage(layers, recompute))
    )


def plan_of(problem: Problem, stages: list[Candidate]) -> Plan:
    return assemble(problem, Evaluation(tuple(stages), problem.price(stages)))


def test_the_formulas() -> None:
    """F = 2, Bw = 4, U = 1; an all-reduce over 3 of 60 bytes at 10 B/s with 0.5 s: 8 + 2 s, of
    which 5 scatter.
    """
    link = Link(10.0, 0.5)
    busy = AsynchronousModel(link).resources_s(SHARDED, 3)
    assert busy["compute"][0] == pytest.approx((2 + 1 / 3 + max(4 + 5 / 6, 5) + 5) / 3)
    plain = AsynchronousModel(link).resources_s(EXAMPLE, 3)
    assert [busy[name][0] for name in ("receive", "send")] == [
        plain[name][0] for name in ("receive", "send")
    ]
    busy = DoubleBufferedModel(link, 7).resources_s(SHARDED, 3)
    assert busy["compute"][0] == pytest.approx(3 * 6 + (5 - 4) + 1 / 3 + 5)
    flush = SynchronousModel(link, find("gpipe"), 7)
    assert flush.end_s(SHARDED, 3)[0] == pytest.approx((5 - 4) + 1 / 3 + 5)
    # Without overlap the two halves take what the all-reduce took, and only the update is shorter.
    alone = AsynchronousModel(replace(link, overlap=False))
    assert 3 * alone.stage_s(SHARDED, 3)[0] == pytest.approx(
        3 * alone.stage_s(EXAMPLE, 3)[0] - 1 + 1 / 3
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1f1b", 1), ("2bw", 8), ("1f1b-flush", 8), ("gpipe", 5)]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_the_formula_is_the_simulation_where_nothing_else_uses_the_links(
    schedule: str, microbatches: int, overlap: bool, recompute: bool
) -> None:
    """One stage of equal layers, each of a bucket of its own; the reduce-scatter is faster than the
    backward.
    """
    heavy = [
        each.model_copy(update={"gradient_bytes": 120 * MB, "weight_bytes": 120 * MB})
        for each in LAYERS
    ]
    cluster = flat_cluster(3, 1000.0 * MB).model_copy(update={"overlap": overlap})
    problem = problem_of(profile(*heavy), cluster, schedule, microbatches)
    for sharded in (False, True):
        stages = [whole(3, sharded=sharded, recompute=recompute)]
        formula_s = problem.price(stages).seconds_per_minibatch
        assert simulated_s(plan_of(problem, stages)) == pytest.approx(formula_s, rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-flush"])
def test_the_halves_move_the_bytes_of_an_all_reduce(schedule: str) -> None:
    microbatches = 4 if find(schedule).divides else 1
    problem = problem_of(
        MODEL, hierarchical_cluster([2, 2], [1000.0, 100.0]), schedule, microbatches
    )
    sent = []
    for sharded in (False, True):
        plan = plan_of(problem, [whole(4, sharded=sharded)])
        timeline = simulate(plan, 8)
        sent.append(
            sum(
                link.bandwidth_bytes_per_s * (end - start) * share
                for link in timeline.links
                if link.sends and link.rank is not None
                for start, end, share in zip(link.start_s, link.end_s, link.share, strict=True)
            )
        )
        rounds = 8 if problem.schedule.divides else 2
        assert sent[-1] == pytest.approx(rounds * 2 * 3 * 720)
        kinds = {event.kind for event in timeline.events.rows()}
        assert ("all_gather" in kinds) == sharded
        assert problem.price([whole(4, sharded=sharded)]).communication_bytes == 2 * 3 * 720 / (
            1 if rounds == 8 else 4
        )
    assert sent[0] == pytest.approx(sent[1])


def test_nobody_goes_on_before_the_weights_are_gathered() -> None:
    problem = problem_of(MODEL, flat_cluster(2, 100.0), "1f1b-flush", 2)
    timeline = simulate(plan_of(problem, [whole(2)]), 3)
    events = sorted(timeline.events.rows(), key=lambda event: event.start_s)
    for rank in (0, 1):
        own = [event for event in events if event.rank == rank]
        gathers = [event for event in own if event.kind == "all_gather"]
        updates = [event for event in own if event.kind == "update"]
        assert len(gathers) == len(updates) == 3
        for update, gather in zip(updates, gathers, strict=True):
            assert update.end_s - update.start_s == pytest.approx(6 * 0.6 / 2)
            assert gather.start_s == pytest.approx(update.end_s)
            assert gather.end_s - gather.start_s == pytest.approx(720 / 2 / 100.0)
            assert all(
                not update.end_s < event.start_s < gather.end_s
                for event in own
                if event.lane == "compute"
            )


def test_each_replica_holds_its_part_of_the_state() -> None:
    problem = problem_of(MODEL, flat_cluster(4, 100.0), "1f1b-flush", 8)
    plain, sharded = (problem.price([whole(4, sharded=each)]).memory[0] for each in (False, True))
    assert (plain.optimizer_bytes, sharded.optimizer_bytes) == (6 * 241, -(-6 * 241 // 4))
    assert plain.model_copy(update={"optimizer_bytes": 0}) == sharded.model_copy(
        update={"optimizer_bytes": 0}
    )


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_with_several_chunks_every_stage_has_its_own_halves(schedule: str) -> None:
    chunked = find(schedule)
    setting = Setting(flat_cluster(4, 1000.0), chunked, 8, chunked.fixed_chunks or 2)
    problem = Problem(LayerCosts(MODEL), setting)
    stages = candidates([[0], [1, 2], [3, 4], [5]], [2] * 4)
    sharded = [replace(stage, options=replace(stage.options, level=1)) for stage in stages]
    plain_s, sharded_s = (problem.price(each).seconds_per_minibatch for each in (stages, sharded))
    # three layers of 0.6 s update, of which half is left, and 0.18 s to gather
    assert sharded_s < plain_s
    plan = plan_of(problem, sharded)
    assert simulated_s(plan) < simulated_s(plan_of(problem, stages))
    assert (
        len([event for event in simulate(plan, 2).events.rows() if event.kind == "all_gather"])
        == 2 * 2 * 4
    )


@pytest.mark.parametrize(
    ("bandwidth", "seconds"), [(20 * MB, 16.0), (60 * MB, 9.0), (240 * MB, 7.5)]
)
def test_a_group_that_recomputes_between_backwards_hides_an_all_reduce(
    bandwidth: float, seconds: float
) -> None:
    """Two blocks of 1 + 2 s; the first recomputes when the second one's gradients, half of all, are
    there already.
    """
    blocks = [layer(f"h.{n}", 1, 2, weight_bytes=120 * MB) for n in range(2)]
    model = profile(*(each.model_copy(update={"outputs": ()}) for each in blocks))
    problem = problem_of(model, flat_cluster(2, bandwidth), "gpipe", 2)
    layers = frozenset({0, 1})
    first = Candidate(frozenset(), layers, StageOptions(2, recompute=(frozenset({0}),)))
    plan = plan_of(problem, [first])
    # At 20 MB/s the all-reduce of 12 s begins 2 s into the backward of 2 + 1 + 2 s. At 240 MB/s 1 s
    # is all it takes.
    assert simulated_s(plan) == pytest.approx(seconds)
    events = [event for event in simulate(plan, 1).events.rows() if event.rank == 0]
    assert "recompute" not in {event.kind for event in events}  # it is within the backward
    last = Candidate(frozenset(), layers, StageOptions(2, recompute=(frozenset({1}),)))
    assert simulated_s(plan_of(problem, [last])) >= simulated_s(plan)
    evaluation = Evaluation((first,), problem.price([first]))
    assert costs_of(plan).stages == pipeline_for(problem, evaluation).stages


@pytest.mark.parametrize("schedule", [find("1f1b"), find("zb-h1"), find("interleaved")], ids=str)
def test_plans_simulate_as_their_candidates(schedule: Schedule) -> None:
    chunks = 2 if schedule.chunked else 1
    microbatches = 8 if schedule.divides else 1
    problem = Problem(
        LayerCosts(MODEL), Setting(flat_cluster(4, 1000.0), schedule, microbatches, chunks)
    )
    groups = [[0], [1, 2], [3, 4], [5]] if schedule.chunked else [[0, 1, 2], [3, 4, 5]]
    stages = [
        replace(
            stage, options=StageOptions(2, level=1, recompute=(frozenset({min(stage.layers)}),))
        )
        for stage in candidates(groups, [2] * len(groups))
    ]
    evaluation = Evaluation(tuple(stages), problem.price(stages))
    plan = assemble(problem, evaluation)
    assert costs_of(plan).stages == pipeline_for(problem, evaluation).stages
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
