"""v-half and v-min: order, bubble and memory as the paper and its authors' code have them."""

from __future__ import annotations

from collections import Counter

import pytest

from planner.plan.shape import shape_of
from planner.schedule.controllable_memory import V_HALF, V_MIN, ControllableMemory
from planner.schedule.schedule import Channel
from planner.schedule.zb_v import ZB_V, VShaped
from planner.selfcheck.lab import even_plan
from planner.simulator.pipeline_costs import StageCosts
from planner.simulator.simulate_plan import simulate
from tests.samples import layer, profile
from tests.schedule.check import check_streams
from tests.schedule.draw import draw_order
from tests.schedule.test_zb_v import make_v
from tests.simulator.pipelines import FREE, run

BOTH = pytest.mark.parametrize("schedule", [V_HALF, V_MIN], ids=str)


def most_together(schedule: VShaped, workers: int, units: int) -> int:
    """Return the most chunks that any worker has in flight at once."""
    most = 0
    for position in range(workers):
        held = 0
        for work, _, _ in schedule.order(workers, 2, position, units):
            held += {"F": 1, "B": -1, "W": -1}.get(work, 0)
            most = max(most, held)
    return most


def test_order_of_three_workers() -> None:
    """No worker has more than four chunks in flight, where 1F1B has six.

    ' marks the second chunk. The first stage sends no gradients and has whole backwards.
    """
    assert draw_order(make_v(3, 1, 4, schedule=V_HALF), 1) == [
        "F0.0 F0.1 F0.0' B0.0' F0.2 W0.0' F0.1' B0.1' W0.1' F0.3 B0.0 F0.2' B0.2' W0.2' B0.1 "
        "F0.3' B0.3' W0.3' B0.2 B0.3 U0' U0",
        "F0.0 F0.0' F0.1 B0.0' F0.1' W0.0' F0.2 B0.0 B0.1' W0.0 F0.2' W0.1' F0.3 B0.1 B0.2' W0.1 "
        "F0.3' W0.2' B0.2 B0.3' W0.2 W0.3' B0.3 W0.3 U0' U0",
        "F0.0 F0.0' F0.1 F0.1' B0.0' B0.0 W0.0' F0.2 W0.0 F0.2' B0.1' B0.1 W0.1' F0.3 W0.1 F0.3' "
        "B0.2' B0.2 W0.2' W0.2 B0.3' B0.3 W0.3' W0.3 U0' U0",
    ]


@BOTH
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("replicas", [1, 2])
def test_any_number_of_microbatches_completes(
    schedule: ControllableMemory, workers: int, replicas: int
) -> None:
    skips = (Channel(0, 2 * workers - 1, gradient=False),) if workers > 1 else ()
    for microbatches in range(1, 13):  # fewer than replicas, too
        check_streams(make_v(workers, replicas, microbatches, skips, schedule), 3)


@pytest.mark.parametrize(
    ("schedule", "workers", "microbatches", "published"),
    [
        (V_HALF, 3, 6, 5),
        (V_HALF, 4, 8, 5),
        (V_HALF, 5, 10, 11),
        (V_HALF, 6, 12, 11),
        (V_HALF, 8, 16, 17),
        (V_HALF, 8, 8, 17),
        (V_MIN, 3, 6, 5),
        (V_MIN, 4, 8, 11),
        (V_MIN, 5, 10, 15),
        (V_MIN, 6, 12, 17),
        (V_MIN, 8, 16, 27),
    ],
)
def test_the_bubble_is_that_of_the_authors_code(
    schedule: ControllableMemory, workers: int, microbatches: int, published: int
) -> None:
    """Slots that zbv_greedy.py of sail-sg/zero-bubble-pipeline-parallelism leaves empty, with
    forward and both parts of the backward of one slot each.
    """
    shape = make_v(workers, 1, microbatches, schedule=schedule)
    times = (StageCosts(1.0, 2.0, 0.0),) * (2 * workers)
    ends_s = run(shape, times, FREE, 4).ends_s
    minibatch_s = (ends_s[-1] - ends_s[microbatches - 1]) / 3
    assert minibatch_s == pytest.approx(2 * 3 * microbatches + published)


def test_activations_are_a_half_and_a_third_of_those_of_1f1b() -> None:
    """Of 2p chunks: p + 2, and for v-min 2p/3 and what the ends add (section 4 of the paper)."""
    for workers in (6, 12, 24):
        assert most_together(V_HALF, workers, 4 * workers) == workers + 2
        assert most_together(V_MIN, workers, 4 * workers) <= 2 * workers / 3 + 3


@pytest.mark.parametrize("workers", [4, 8, 16])
def test_plans_count_less_in_flight_the_less_a_schedule_holds(workers: int) -> None:
    counted = [_most_counted(each, workers) for each in (V_MIN, V_HALF, ZB_V)]
    assert counted == sorted(set(counted))


def _most_counted(schedule: VShaped, workers: int) -> int:
    """Return the most chunks that plans count for a worker, each stage at its own peak."""
    depths = schedule.depths((1,) * 2 * workers, 4 * workers, 2)
    return max(map(sum, zip(depths, reversed(depths), strict=True)))


@BOTH
@pytest.mark.parametrize("workers", [2, 3, 4, 6])
def test_what_is_repeated_is_what_would_have_followed(
    schedule: ControllableMemory, workers: int
) -> None:
    """Every microbatch passes once, in order, and no more are in flight than of few ones."""
    few = most_together(schedule, workers, 3 * workers)
    for units in (3 * workers + 1, 97, 98, 99, 200):
        for position in range(workers):
            steps = list(schedule.order(workers, 2, position, units))
            assert Counter(steps).most_common(1)[0][1] == 1
            for work, chunk in {step[:2] for step in steps}:
                own = [unit for each, part, unit in steps if (each, part) == (work, chunk)]
                assert own == list(range(units))
        assert most_together(schedule, workers, units) == few


def test_an_hour_of_microbatches_needs_no_hour() -> None:
    """Periods are repeated: the order of the last worker of 32 begins at once."""
    steps = V_HALF.order(32, 2, 31, 10**6)
    assert next(steps) == ("F", 0, 0)


@BOTH
def test_simulated_memory_stays_below_what_is_planned(schedule: ControllableMemory) -> None:
    model = profile(
        *(
            layer(f"l{i}", 1, 2, output_bytes=1, weight_bytes=8, saved_bytes=1000, update_s=0)
            for i in range(16)
        )
    )
    peaks = {}
    for each in (ZB_V, schedule):
        plan = even_plan(model, each, (1,) * 8, microbatches=32)
        check_streams(shape_of(plan), 2)
        curves = simulate(plan, 2).memory
        limits = {
            rank: sum(s.memory.total_bytes for s in plan.stages if rank in s.ranks)
            for rank in range(8)
        }
        for curve in curves:
            assert max(curve.held_bytes) <= limits[curve.rank]
        peaks[each] = max(max(curve.held_bytes) for curve in curves)
    assert peaks[schedule] < 0.7 * peaks[ZB_V]
