"""The table of `plan fit`: baselines that fit, and by how much the plan is faster."""

from __future__ import annotations

from benchmarks.fit.__main__ import _speeds
from planner.formats.cluster import flat_cluster
from planner.solver import solve
from tests.samples import layer, profile


def test_baselines_that_fit_stand_beside_the_plan() -> None:
    model = profile(*(layer(f"blocks.{i}", 0.1, 0.2, output_bytes=10**6, weight_bytes=10**8) for i in range(8)))
    plan = solve(
        model.model_copy(update={"optimizer_elementwise": True}),
        flat_cluster(4, 1.25e8),
        schedule="1f1b-flush",
        microbatches=8,
    )
    config, seconds, sharded, _, equal, gain, whole = _speeds(plan)
    assert config == f"{plan.config}, 1f1b-flush"
    assert sharded.startswith("ZeRO-")
    assert "equal stages: " in equal
    assert gain.endswith("%")
    assert seconds.endswith(("s", "ms"))
    assert whole.endswith(("s", "ms"))
