"""Runs compared with their simulations: timing errors by hand, and stage times told from everything
else.

The timing errors are those of `tests.simulator.timing_errors`: other tests of the simulator compare
runs by them, too.
"""

from __future__ import annotations

import pytest

from planner.analysis.compare_runs import MeanStageTimes, compare_runs, mean_stage_times
from planner.errors import InputError
from planner.formats.cluster import Level, flat_cluster
from planner.formats.plan import Plan
from planner.formats.timeline import Event, Events, Timeline
from planner.reporting.tables.runs import run_comparison_report
from planner.simulator.simulate_plan import costs_of, simulate, simulate_recorded
from tests.samples import layer
from tests.simulator.plans import equal_layers, plan_of
from tests.simulator.timing_errors import Moment, TimingError, timing_error, with_stage_times
from tests.timelines import EVENTS, by_hand


def three_stages(schedule: str = "1f1b", microbatches: int = 1) -> Plan:
    layers = equal_layers(3, output_bytes=10, weight_bytes=10, saved_bytes=5)
    return plan_of(layers, (1, 1, 1), schedule=schedule, microbatches=microbatches)


def slower_stage(plan: Plan, stage: int, factor: float) -> Plan:
    """The plan as it would really run."""
    times = [
        MeanStageTimes(forward_s=s.forward_s, backward_s=s.backward_s, update_s=s.update_s)
        for s in plan.stages
    ]
    times[stage] = MeanStageTimes(
        forward_s=times[stage].forward_s * factor,
        backward_s=times[stage].backward_s * factor,
        update_s=times[stage].update_s,
    )
    return with_stage_times(plan, times)


def as_planned_and_as_run(plan: Plan, measured: Timeline) -> tuple[TimingError, TimingError]:
    """The errors at the plan's stage times, and at the run's own."""
    as_run = with_stage_times(plan, mean_stage_times(measured))
    both = (simulate_recorded(each, measured) for each in (plan, as_run))
    return tuple(timing_error(each, measured) for each in both)  # type: ignore[return-value]


def run_of(plan: Plan, minibatches: int) -> Timeline:
    return simulate(plan, minibatches).model_copy(
        update={"source": "measured", "memory": (), "links": ()}
    )


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1f1b", 1), ("gpipe", 4), ("1f1b-flush", 4), ("zb-h1", 4)]
)
def test_a_slower_stage_is_found(schedule: str, microbatches: int) -> None:
    plan = three_stages(schedule, microbatches)
    measured = run_of(slower_stage(plan, 1, 1.2), 20)
    planned, own = as_planned_and_as_run(plan, measured)
    assert planned.worst_share > 0.02
    assert own.worst_share < 1e-9
    found = compare_runs(simulate_recorded(plan, measured), measured)
    assert found.stages[1].measured.forward_s == pytest.approx(
        1.2 * found.stages[1].simulated.forward_s
    )
    assert found.stages[0].measured.forward_s == pytest.approx(found.stages[0].simulated.forward_s)
    text = run_comparison_report(found, plan)
    assert "(-16.7%)" in text


def test_what_is_not_the_stages_times_stays() -> None:
    """A run over a link that is slower than the plan's."""
    layers = equal_layers(2, output_bytes=10, weight_bytes=10, saved_bytes=5)
    plan = plan_of(layers, (1, 1), schedule="gpipe", microbatches=4)
    slow = plan.cluster.model_copy(update={"levels": (Level(size=2, bandwidth_bytes_per_s=5.0),)})
    measured = run_of(plan.model_copy(update={"cluster": slow}), 10)
    planned, own = as_planned_and_as_run(plan, measured)
    assert planned.worst_share > 0.1
    assert own.worst_share == pytest.approx(planned.worst_share)


def test_what_messages_cost_the_processor_is_counted_once() -> None:
    plan = three_stages()
    cluster = plan.cluster.model_copy(update={"overlap": False})
    handled = plan.model_copy(update={"cluster": cluster})
    measured = run_of(handled, 30)
    means = mean_stage_times(measured)
    assert means[1].forward_s > plan.stages[1].forward_s
    again = costs_of(with_stage_times(handled, means)).stages
    for one, other in zip(again, costs_of(handled).stages, strict=True):
        assert one.forward_s == pytest.approx(other.forward_s)
        assert one.backward_s == pytest.approx(other.backward_s)
    assert as_planned_and_as_run(handled, measured)[1].worst_share < 1e-9


def test_recomputing_stages_are_told_apart_too() -> None:
    plan = three_stages()
    stages = tuple(stage.model_copy(update={"recompute": True}) for stage in plan.stages)
    plan = plan.model_copy(update={"stages": stages})
    measured = run_of(slower_stage(plan, 0, 1.5), 20)
    assert as_planned_and_as_run(plan, measured)[1].worst_share == pytest.approx(0, abs=1e-9)


def test_an_all_gather_is_part_of_the_update() -> None:
    """A worker notes both as one; the simulator draws two."""
    layers = [layer("a", weight_bytes=1000, update_s=0.5)]
    plan = plan_of(layers, (2,), flat_cluster(2, 1000.0), schedule="1f1b-flush", microbatches=2)
    stage = plan.stages[0].model_copy(update={"sharded": True, "update_s": 0.25})
    plan = plan.model_copy(update={"stages": (stage,)})
    measured = run_of(plan, 8)
    (means,) = mean_stage_times(measured)
    assert means.update_s == pytest.approx(0.25 + 0.5)  # half of 1000 bytes at 1000 B/s
    assert with_stage_times(plan, [means]).stages[0].update_s == pytest.approx(0.25)
    assert as_planned_and_as_run(plan, measured)[1].worst_share < 1e-9


def changed(*events: Event) -> Timeline:
    """The run by hand with other events."""
    return by_hand().model_copy(update={"source": "measured", "events": Events.of(events)})


def test_distances_are_shares_of_the_measured_run() -> None:
    # The backward of stage 1 takes 1 s more, and all after it is as much later; the run now ends at
    # 7.875 s.
    later = [
        e if e.start_s < 4.5 else e._replace(start_s=e.start_s + 1, end_s=e.end_s + 1)
        for e in EVENTS
    ]
    later[4] = later[4]._replace(end_s=5.5)
    apart = timing_error(by_hand(), changed(*later))
    assert apart.events == 4
    # Of eight starts and ends five are where they were, and three a second later.
    assert apart.median_share == 0
    assert apart.worst_share == apart.p95_share == pytest.approx(1 / 7.875)
    assert apart.worst is not None
    assert apart.worst.name in ("B0",)
    assert timing_error(by_hand(), by_hand()).worst_share == 0


def test_the_worst_is_named() -> None:
    late = EVENTS[3]._replace(start_s=2.0)
    found = timing_error(by_hand(), changed(*EVENTS[:3], late, *EVENTS[4:]))
    assert found.worst == Moment(
        name="F0", at="start", rank=1, stage=1, predicted_s=1.5, measured_s=2.0
    )
    assert found.worst_share == pytest.approx(0.5 / 6.875)
    nothing = timing_error(by_hand(), changed())
    assert (nothing.events, nothing.worst_share, nothing.worst) == (0, 0.0, None)


def test_another_plan_is_refused() -> None:
    with pytest.raises(InputError, match="its config '2-1' is not the plan's '1-1'"):
        compare_runs(by_hand(), by_hand().model_copy(update={"config": "2-1"}))


def test_a_backward_begins_with_the_forward_that_runs_again() -> None:
    """A worker notes both as one; the simulator draws two."""
    first = EVENTS[8]
    apart_of = [first._replace(kind="recompute", end_s=5.75), first._replace(start_s=5.75)]
    assert timing_error(
        by_hand().model_copy(update={"events": Events.of([*EVENTS[:8], *apart_of])}), by_hand()
    ) == (timing_error(by_hand(), by_hand()))
    means = mean_stage_times(changed(*EVENTS[:8], *apart_of, EVENTS[9]))
    assert means == mean_stage_times(by_hand())
    assert means[0] == MeanStageTimes(forward_s=1.0, backward_s=2.0, update_s=0.125)


def test_both_parts_of_a_backward_count_as_one() -> None:
    parts = [
        EVENTS[8]._replace(kind="backward_input", end_s=6.0),
        EVENTS[8]._replace(kind="backward_weight", start_s=6.25),
    ]
    means = mean_stage_times(changed(*EVENTS[:8], *parts))
    assert means[0] == MeanStageTimes(forward_s=1.0, backward_s=1.75, update_s=0.0)
