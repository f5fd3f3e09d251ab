"""A minibatch of so many samples is kept by every candidate, or refused in one sentence."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.solver import search_plan as solve
from planner.solver.find_plan import find_plan
from planner.solver.request import Request
from tests.samples import layer, profile

# microbatches of 4
MODEL = profile(*(layer(f"l{n}", 1, 2, output_bytes=10, weight_bytes=100) for n in range(4)))
CLUSTER = flat_cluster(2, 1e3)


def test_a_minibatch_is_counted_in_microbatches() -> None:
    assert solve(MODEL, CLUSTER, schedule="1f1b-flush", minibatch=24).microbatches == 6
    assert solve(MODEL, CLUSTER, minibatch=4).microbatches == 1
    request = Request.of(MODEL, CLUSTER, SolveOptions(schedule=FLUSH, minibatch=24))
    assert find_plan(request).microbatches == 6


@pytest.mark.parametrize(
    ("schedule", "minibatch", "message"),
    [
        (
            "1f1b-flush",
            22,
            "`minibatch=22` is no multiple of the 4 samples of a microbatch\nhint: give "
            "`minibatch=20`",
        ),
        ("1f1b-flush", 2, "give `minibatch=4`"),
        (
            "1f1b",
            24,
            "under 1f1b a minibatch has the 4 samples that were profiled, not `minibatch=24`",
        ),
    ],
)
def test_other_sizes_are_refused(schedule: str, minibatch: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        solve(MODEL, CLUSTER, schedule=schedule, minibatch=minibatch)


def test_a_profile_without_a_size_has_no_samples_to_count() -> None:
    unknown = MODEL.model_copy(update={"microbatch_size": None})
    with pytest.raises(InputError, match="does not know its batch size"):
        solve(unknown, CLUSTER, schedule="1f1b-flush", minibatch=8)


def test_samples_and_microbatches_are_not_both_given() -> None:
    with pytest.raises(InputError, match="say the same twice"):
        solve(MODEL, CLUSTER, schedule=FLUSH, microbatches=2, minibatch=8)
