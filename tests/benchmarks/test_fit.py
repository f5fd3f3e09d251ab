"""The table of `plan fit`: baselines that fit, and by how much the plan is faster."""

from __future__ import annotations

from benchmarks.fit.__main__ import _speeds
from planner.formats.cluster import flat_cluster
from planner.formats.plan_parts import OtherWay
from planner.schedule.flush import FLUSH
from planner.solver import solve
from tests.samples import layer, profile


def way(name: str, seconds: float, over_memory_bytes: int = 0) -> OtherWay:
    return OtherWay(
        name=name,
        config="4",
        schedule=FLUSH,
        microbatches=2,
        seconds_per_microbatch=seconds / 2,
        memory_bytes=1,
        over_memory_bytes=over_memory_bytes,
    )


def test_the_fastest_baselines_that_fit_stand_beside_the_plan() -> None:
    model = profile(*(layer(f"blocks.{i}", 0.1, 0.2, output_bytes=10**6, weight_bytes=10**8) for i in range(8)))
    plan = solve(model, flat_cluster(4, 1.25e8), schedule=FLUSH, microbatches=8)
    second = plan.predicted.seconds_per_minibatch
    ways = (
        way("data parallel", second, 5),
        way("ZeRO-1", second, 5),
        way("ZeRO-2", 3 * second),
        way("ZeRO-3", 2 * second),
    )
    shown = list(_speeds(plan.model_copy(update={"baselines": ways})))
    assert shown[0] == f"{plan.config}, 1f1b-flush"
    assert shown[2].startswith("ZeRO-3: ")
    assert shown[3:] == ["+100.0%", "none fits", "", "does not fit"]
