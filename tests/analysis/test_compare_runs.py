"""Runs laid over their simulations: what is the stages' times is told from what is not."""

from __future__ import annotations

import pytest

from planner.analysis.compare_runs import lay_over, with_times
from planner.analysis.deviation import StageSeconds, mean_seconds
from planner.formats.cluster import Level
from planner.formats.plan import Plan, ScheduleName
from planner.formats.timeline import Timeline
from planner.report.tables.compare_runs import against_report
from planner.simulator.beside import simulate_beside
from planner.simulator.plan import pipeline_of, simulate
from tests.simulator.plans import equal_layers, plan_of


def three_stages(schedule: ScheduleName = "1f1b", microbatches: int = 1) -> Plan:
    layers = equal_layers(3, output_bytes=10, weight_bytes=10, saved_bytes=5)
    return plan_of(layers, (1, 1, 1), schedule=schedule, microbatches=microbatches)


def slower_stage(plan: Plan, stage: int, factor: float) -> Plan:
    """The plan as it would really run."""
    times = [StageSeconds(forward_s=s.forward_s, backward_s=s.backward_s, update_s=s.update_s) for s in plan.stages]
    times[stage] = StageSeconds(
        forward_s=times[stage].forward_s * factor,
        backward_s=times[stage].backward_s * factor,
        update_s=times[stage].update_s,
    )
    return with_times(plan, times)


def run_of(plan: Plan, minibatches: int) -> Timeline:
    return simulate(plan, minibatches).model_copy(update={"source": "measured", "memory": (), "links": ()})


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("gpipe", 4), ("1f1b-flush", 4), ("zb-h1", 4)])
def test_a_slower_stage_is_found(schedule: ScheduleName, microbatches: int) -> None:
    plan = three_stages(schedule, microbatches)
    measured = run_of(slower_stage(plan, 1, 1.2), 20)
    found = lay_over(plan, simulate_beside(plan, measured), measured)
    assert found.as_planned.worst_share > 0.02
    assert found.as_run.worst_share < 1e-9
    assert found.stages[1].measured.forward_s == pytest.approx(1.2 * found.stages[1].simulated.forward_s)
    assert found.stages[0].measured.forward_s == pytest.approx(found.stages[0].simulated.forward_s)
    text = against_report(found, plan)
    assert "(-16.7%)" in text
    assert "at the run's own times" in text


def test_what_is_not_the_stages_times_stays() -> None:
    """A run over a link that is slower than the plan's."""
    layers = equal_layers(2, output_bytes=10, weight_bytes=10, saved_bytes=5)
    plan = plan_of(layers, (1, 1), schedule="gpipe", microbatches=4)
    slow = plan.cluster.model_copy(update={"levels": (Level(size=2, bandwidth_bytes_per_s=5.0),)})
    measured = run_of(plan.model_copy(update={"cluster": slow}), 10)
    found = lay_over(plan, simulate_beside(plan, measured), measured)
    assert found.as_planned.worst_share > 0.1
    assert found.as_run.worst_share == pytest.approx(found.as_planned.worst_share)


def test_what_messages_cost_the_processor_is_counted_once() -> None:
    plan = three_stages()
    cluster = plan.cluster.model_copy(update={"overlap": False})
    handled = plan.model_copy(update={"cluster": cluster})
    measured = run_of(handled, 30)
    means = mean_seconds(measured)
    assert means[1].forward_s > plan.stages[1].forward_s
    for one, other in zip(pipeline_of(with_times(handled, means)).stages, pipeline_of(handled).stages, strict=True):
        assert one.forward_s == pytest.approx(other.forward_s)
        assert one.backward_s == pytest.approx(other.backward_s)
    assert lay_over(handled, simulate_beside(handled, measured), measured).as_run.worst_share < 1e-9


def test_recomputing_stages_are_told_apart_too() -> None:
    plan = three_stages()
    stages = tuple(stage.model_copy(update={"recompute": True}) for stage in plan.stages)
    plan = plan.model_copy(update={"stages": stages})
    measured = run_of(slower_stage(plan, 0, 1.5), 20)
    found = lay_over(plan, simulate_beside(plan, measured), measured)
    assert found.as_run.worst_share == pytest.approx(0, abs=1e-9)
