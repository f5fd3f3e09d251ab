"""What a run tells of devices and links: runs are simulated on the true cluster, and the planned
one has to be put right by them.
"""

from __future__ import annotations

import random

import pytest

import planner
from planner.analysis.measured_cluster import measured_cluster, on_cluster
from planner.errors import InputError
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster, hierarchical_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Layer
from planner.formats.timeline import Events, Timeline
from planner.simulator.simulate_plan import simulate
from tests.samples import profile
from tests.simulator.plans import equal_layers, plan_of

LAYERS = equal_layers(4, output_bytes=1000, weight_bytes=10, saved_bytes=5)


def run_on(plan: Plan, cluster: Cluster, minibatches: int = 30, seed: int = 0) -> Timeline:
    """A run of the plan's stages on other devices and links, with 2% of noise in computations."""
    true = plan.model_copy(update={"cluster": cluster})
    if cluster.kinds:
        stages = [
            stage.model_copy(
                update={
                    "forward_s": stage.forward_s / cluster.kind_of(stage.ranks[0]).speed,
                    "backward_s": stage.backward_s / cluster.kind_of(stage.ranks[0]).speed,
                }
            )
            for stage in plan.stages
        ]
        true = true.model_copy(update={"stages": tuple(stages)})
    drawn = random.Random(seed)
    run = simulate(true, minibatches)
    rows = []
    for event in run.events.rows():
        noise = drawn.uniform(0.98, 1.02) if event.lane == "compute" else 1.0
        rows.append(event._replace(end_s=event.start_s + noise * (event.end_s - event.start_s)))
    return run.model_copy(
        update={"source": "measured", "memory": (), "links": (), "events": Events.of(rows)}
    )


def slower(cluster: Cluster, *speeds: float) -> Cluster:
    kinds = tuple(DeviceKind(count=1, speed=speed) for speed in speeds)
    return cluster.model_copy(update={"kinds": kinds})


def pipeline_of(layers: list[Layer], schedule: str, cluster: Cluster) -> Plan:
    microbatches = 1 if schedule == "1f1b" else 8
    return plan_of(layers, (1, 1, 1, 1), cluster, schedule=schedule, microbatches=microbatches)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-flush", "gpipe", "zb-h1"])
def test_a_slow_device_becomes_a_kind_of_its_own(schedule: str) -> None:
    planned = flat_cluster(4, 1e6)
    plan = pipeline_of(LAYERS, schedule, planned)

    found = measured_cluster(plan, run_on(plan, slower(planned, 1.0, 1.0, 0.5, 1.0)))

    assert [worker.speed for worker in found.workers] == pytest.approx([1, 1, 0.5, 1], rel=0.02)
    assert [(kind.count, kind.speed) for kind in found.cluster.kinds] == [
        (2, 1.0),
        (1, pytest.approx(0.5, rel=0.02)),
        (1, 1.0),
    ]
    assert found.cluster.levels == planned.levels


def test_an_undisturbed_run_changes_nothing() -> None:
    planned = flat_cluster(4, 1e6)
    plan = pipeline_of(LAYERS, "1f1b", planned)
    assert measured_cluster(plan, run_on(plan, planned)).cluster == planned


def test_speeds_multiply_those_of_kinds_that_the_plan_knows() -> None:
    planned = slower(flat_cluster(4, 1e6), 2.0, 2.0, 1.0, 1.0)
    plan = pipeline_of(LAYERS, "1f1b", flat_cluster(4, 1e6)).model_copy(update={"cluster": planned})
    throttled = slower(planned, 1.0, 0.5, 1.0, 1.0)  # of what the plan's stages take

    found = measured_cluster(plan, run_on(plan, throttled))

    assert [(kind.count, kind.speed) for kind in found.cluster.kinds] == [
        (1, 2.0),
        (3, pytest.approx(1.0, rel=0.02)),
    ]


@pytest.mark.parametrize("factor", [0.1, 0.5, 3.0])
def test_rates_of_levels_are_corrected_apart(factor: float) -> None:
    planned = hierarchical_cluster((2, 2), (1e4, 2e3))
    plan = pipeline_of(LAYERS, "1f1b", planned)
    true = hierarchical_cluster((2, 2), (1e4, 2e3 * factor))

    inside, between = measured_cluster(plan, run_on(plan, true)).cluster.levels

    assert inside == planned.levels[0]
    assert between.bandwidth_bytes_per_s == pytest.approx(2e3 * factor, rel=0.1)


def test_links_that_no_message_crossed_stay_as_they_are() -> None:
    planned = flat_cluster(4, 1e6)
    plan = plan_of(equal_layers(1, weight_bytes=100), (4,), planned)
    found = measured_cluster(plan, run_on(plan, planned))
    assert [link.measured_bytes_per_s for link in found.links] == [None]
    assert found.cluster == planned


def test_a_plan_for_the_measured_cluster_is_faster_on_it() -> None:
    model = profile(*equal_layers(8, output_bytes=1000, weight_bytes=100_000, saved_bytes=5))
    plan = planner.solve(model, flat_cluster(4, 1e4))
    assert plan.config == "1-1-1-1"
    slow = slower(plan.cluster, 0.4, 1.0, 1.0, 1.0)
    found = measured_cluster(plan, run_on(plan, slow))

    again = planner.solve(model, found.cluster)

    as_it_runs = on_cluster(model, plan, found.cluster)
    # Both update after one microbatch.
    assert again.microbatches == as_it_runs.microbatches == 1
    assert 1.1 * again.predicted.seconds_per_minibatch < as_it_runs.predicted.seconds_per_minibatch


def test_other_runs_are_refused() -> None:
    planned = flat_cluster(4, 1e6)
    plan = pipeline_of(LAYERS, "1f1b", planned)
    of_another = run_on(pipeline_of(LAYERS, "gpipe", planned), planned)
    with pytest.raises(InputError, match="the run is of another plan"):
        measured_cluster(plan, of_another)
    with pytest.raises(InputError, match="too few to tell its speed"):
        measured_cluster(plan, run_on(plan, planned, minibatches=2))
