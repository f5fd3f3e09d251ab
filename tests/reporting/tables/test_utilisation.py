"""What is said of a plan that uses little of its GPUs' peak."""

from __future__ import annotations

import pytest

from planner.analysis.limits import Limits
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.reporting.tables.utilisation import little_use_words
from planner.solver import search_plan
from tests.samples import layer, profile

MODEL = profile(*(layer(f"l{n}", 1, 2, output_bytes=1) for n in range(4)))


def using(share: float | None) -> Plan:
    """A plan that uses so much of the peak."""
    plan = search_plan(MODEL, flat_cluster(4, 1e9), schedule="1f1b-flush", microbatches=4)
    predicted = plan.predicted.model_copy(update={"flop_utilisation": share})
    return plan.model_copy(update={"predicted": predicted})


@pytest.mark.parametrize("share", [None, 0.1, 0.4])
def test_nothing_is_said_where_the_use_is_usual_or_not_known(share: float | None) -> None:
    assert little_use_words(using(share), Limits("the computation of stage 0", 0.3, 0.7)) is None


def test_what_takes_the_time_instead_is_said() -> None:
    """Idle workers and what limits them, small operations, or that nobody simulated it."""
    plan = using(0.031)
    idle = little_use_words(plan, Limits("the link of stage 0, sending", 0.93, 0.71))
    assert idle == (
        "the plan uses 3.1% of the GPUs' peak, which is little: workers are idle 71% of the time; "
        "what limits them, the link of stage 0, sending, is busy 93% of it; a minibatch has 4 "
        f"microbatches for {plan.workers} GPUs"
    )
    small = little_use_words(plan, Limits("the computation of stage 0", 0.93, 0.1))
    assert small is not None
    assert "workers compute 90% of the time, in operations that are small" in small
    assert "with microbatches of 4 samples" in small
    unknown = little_use_words(plan, None)
    assert unknown is not None
    assert unknown.endswith("its time was not simulated, so what it waits for is not known")
