"""The simpler of two plans that estimates cannot tell apart."""

from __future__ import annotations

import planner
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Device, Profile
from planner.reporting.tables.plan import plan_report
from planner.solver.alternatives.simpler_ways import indistinct_share
from planner.solver.tuning.record import STANDARD
from tests.samples import layer, profile

# Pipelines take some 105 s for 32 microbatches. So does data parallelism where its all-reduce of
# 6 GB goes on for 9 s after the last backward, and more on slower links.
MODEL = profile(
    *(layer(name, 1.0, 2.0, output_bytes=10**6, weight_bytes=10**9) for name in "abc"),
    layer("d", 1.0, 2.0, weight_bytes=10**9),
)
ESTIMATED = MODEL.model_copy(update={"device": Device(kind="cuda", name="NVIDIA L4 24 GB")})
A_LITTLE_FASTER, MUCH_FASTER = 0.37e9, 0.1e9  # bytes per second at which the pipeline is so


def solved(model: Profile, rate: float) -> Plan:
    return planner.solve(model, flat_cluster(4, rate), schedule="1f1b-flush", microbatches=32)


def test_a_measured_pipeline_stays() -> None:
    plan = solved(MODEL, A_LITTLE_FASTER)
    assert plan.predicted.speed_interval is None
    assert indistinct_share(plan, STANDARD) == 0
    assert len(plan.stages) > 1


def test_an_estimated_one_gives_way_to_data_parallelism_that_is_as_fast() -> None:
    measured = solved(MODEL, A_LITTLE_FASTER)
    plan = solved(ESTIMATED, A_LITTLE_FASTER)
    gain = plan.predicted.seconds_per_minibatch / measured.predicted.seconds_per_minibatch - 1
    assert 0 < gain < indistinct_share(plan, STANDARD)
    assert plan.config == "4"
    (note,) = plan.notes
    assert note.startswith(
        f"{measured.config} is estimated to be {gain:.1%} faster, which is within the error"
    )
    assert plan.estimated_faster == f"{measured.config} is estimated to be {gain:.1%} faster"
    first = plan_report(plan).splitlines()[0]
    assert first.startswith(
        f"Use data parallelism: {plan.estimated_faster}, within the error of estimates; "
    )


def test_an_estimated_one_that_is_clearly_faster_stays() -> None:
    plan = solved(ESTIMATED, MUCH_FASTER)
    assert len(plan.stages) > 1
    assert plan.notes == ()
