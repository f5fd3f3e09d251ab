"""What is known of sizes of microbatches before any search."""

from __future__ import annotations

from functools import partial

import pytest

from planner.formats.cluster import flat_cluster
from planner.options.solving import SolveOptions
from planner.solver import search_plan
from planner.solver.clock import Clock
from planner.solver.request import Request
from planner.solver.sizes.microbatches import least_sample_s
from tests.samples import layer, profile
from tests.solver.test_degrees import divided

CHAIN = profile(*(layer(f"l{n}", 1.0, 2.0, output_bytes=1) for n in range(8)))
FAST = partial(flat_cluster, bandwidth_bytes_per_s=1e12)


@pytest.mark.parametrize("microbatches", [2, 4, 16])
def test_no_plan_takes_less_for_a_sample_than_the_bound(microbatches: int) -> None:
    """Ranks that divide layers compute the first microbatch together, also where others would wait
    for it.
    """
    model = divided(CHAIN, 2, 4)
    options = SolveOptions(schedule="1f1b-flush", microbatches=microbatches)
    plan = search_plan(
        model, FAST(8), schedule="1f1b-flush", microbatches=microbatches, tensor=(1, 2, 4)
    )
    sample_s = plan.predicted.seconds_per_minibatch / (microbatches * 4)

    request = Request(model, FAST(8), options, Clock())
    bound_s = least_sample_s(request, ranks=4)
    assert 0 < bound_s <= sample_s * (1 + 1e-9)
    if microbatches < 8:
        assert sample_s < least_sample_s(request, ranks=1), "undivided layers cannot do this"
