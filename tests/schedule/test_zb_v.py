"""zb-v: its order, its bubble, what is in flight, and plans for it."""

from __future__ import annotations

import pytest

from planner.formats.cluster import flat_cluster
from planner.plan.shape import shape_of
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Channel, PipelineShape
from planner.schedule.zb_v import ZB_V, VShaped
from planner.simulator.pipeline_costs import StageCosts
from planner.simulator.simulate_plan import simulate
from planner.solver import search_plan as solve
from tests.samples import layer, profile
from tests.schedule.check import check_streams
from tests.schedule.draw import draw_order
from tests.simulator.pipelines import FREE, run


def make_v(
    workers: int,
    replicas: int,
    microbatches: int,
    extra: tuple[Channel, ...] = (),
    schedule: VShaped = ZB_V,
) -> PipelineShape:
    """Stages 0 .. p-1 down the workers, p .. 2p-1 back up."""
    ranks = [tuple(range(worker * replicas, (worker + 1) * replicas)) for worker in range(workers)]
    chain = tuple(Channel(stage, stage + 1) for stage in range(2 * workers - 1))
    return PipelineShape((*ranks, *reversed(ranks)), chain + extra, schedule, microbatches)


def test_the_stages_of_a_worker_make_a_v() -> None:
    assert [ZB_V.worker_of(stage, 4) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_order_of_two_workers_is_that_of_the_paper() -> None:
    """A V of two: ' marks the second chunk. The first stage sends no gradients and has whole
    backwards.
    """
    assert draw_order(make_v(2, 1, 4), 1) == [
        "F0.0 F0.1 F0.2 F0.0' B0.0' W0.0' F0.1' B0.1' W0.1' F0.3 B0.0 F0.2' B0.2' W0.2' B0.1 "
        "F0.3' B0.3' W0.3' "
        "B0.2 B0.3 U0' U0",
        "F0.0 F0.0' F0.1 F0.1' B0.0' W0.0' F0.2 B0.0 W0.0 F0.2' B0.1' W0.1' F0.3 B0.1 W0.1 F0.3' "
        "B0.2' W0.2' "
        "B0.2 B0.3' B0.3 W0.2 W0.3' W0.3 U0' U0",
    ]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_any_number_of_microbatches_completes(workers: int, replicas: int) -> None:
    skips = (Channel(0, 2 * workers - 1, gradient=False),) if workers > 1 else ()
    for microbatches in range(1, 13):  # fewer than replicas, too
        check_streams(make_v(workers, replicas, microbatches, skips), 3)


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (2, 16), (4, 8), (4, 13), (8, 16)])
def test_there_is_no_bubble_where_all_parts_take_equally_long(
    workers: int, microbatches: int
) -> None:
    shape = make_v(workers, 1, microbatches)
    times = (StageCosts(1.0, 2.0, 0.0),) * (2 * workers)  # B and W take 1 each
    ends_s = run(shape, times, FREE, 4).ends_s
    assert (ends_s[-1] - ends_s[microbatches - 1]) / 3 == pytest.approx(2 * 3 * microbatches)


def test_every_worker_holds_about_as_much_as_the_first_of_1f1b() -> None:
    depths = ZB_V.depths((1,) * 8, 16, 2)
    assert depths == (8, 7, 6, 5, 4, 3, 2, 1)
    # of half a worker's layers each
    assert [depths[worker] + depths[7 - worker] for worker in range(4)] == [9] * 4


def test_plans_are_fastest_where_weights_are_large_and_layers_equal() -> None:
    """Data parallelism would send 16 TB per minibatch; among pipelines zb-v alone has no bubble."""
    model = profile(
        *(layer(f"l{i}", 1, 2, output_bytes=1, weight_bytes=10**12, update_s=0) for i in range(16))
    )
    synchronous = [each for each in SCHEDULES if not each.asynchronous]
    plans = [
        solve(model, flat_cluster(4, 1e9), schedule=each, microbatches=8) for each in synchronous
    ]
    plan = min(plans, key=lambda each: each.predicted.seconds_per_minibatch)
    assert plan.schedule is ZB_V
    assert plan.predicted.seconds_per_minibatch == pytest.approx(8 * 3 * 16 / 4)
    assert plan.solver.status == "optimal"
    assert [stage.ranks for stage in plan.stages] == [
        (0,),
        (1,),
        (2,),
        (3,),
        (3,),
        (2,),
        (1,),
        (0,),
    ]
    assert {len(stage.layers) for stage in plan.stages} == {2}
    check_streams(shape_of(plan), 3)
    # What goes from the fourth stage to the fifth stays on its worker.
    sent = [
        event
        for event in simulate(plan, 2).events.rows()
        if event.kind == "send_activation" and event.stage == 3
    ]
    assert not sent


def test_memory_limits_are_kept() -> None:
    model = profile(
        *(
            layer(f"l{i}", 1, 2, output_bytes=1, weight_bytes=10**6, saved_bytes=10**6, update_s=0)
            for i in range(16)
        )
    )
    free = solve(model, flat_cluster(4, 1e4), schedule="zb-v", microbatches=8)
    limit = max(free.memory_bytes(stage) for stage in range(len(free.stages))) - 1
    tight = solve(model, flat_cluster(4, 1e4, limit), schedule="zb-v", microbatches=8)
    assert all(tight.memory_bytes(stage) <= limit for stage in range(len(tight.stages)))
