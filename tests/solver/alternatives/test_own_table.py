"""No answer is slower than a row of its own table with as many samples per update, for any number
of samples, also fewer than GPUs, and whatever time there was.
"""

from __future__ import annotations

import random

import pytest

from planner.errors import PlannerError
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.solver.request import Request
from planner.solver.solve import solve
from planner.solver.tuning.record import STANDARD
from tests.solver.test_degrees import divided
from tests.solver.test_floor import random_cluster, random_model

LIMITS_S = (1e-3, 0.2, None)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(200))
def test_no_row_of_the_table_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng).model_copy(update={"microbatch_size": 1})
    cluster = random_cluster(rng, model)
    tensor: tuple[int, ...] = (1,)
    if not cluster.kinds and rng.random() < 0.5:
        model, tensor = divided(model, 2), (1, 2)
    samples = rng.randint(1, 3 * cluster.gpus)
    options = SolveOptions(
        schedule=FLUSH, minibatch=samples, tensor=tensor, time_limit_s=rng.choice(LIMITS_S)
    )
    try:
        plan = solve(Request.of(model, cluster, options))
    except PlannerError:
        return  # nothing fits, which other tests look at

    assert plan.samples_per_update == (samples, samples)
    seconds = plan.predicted.seconds_per_minibatch / plan.microbatches
    told_apart = 1 + STANDARD.answer.indistinguishable_share
    same = [way for way in plan.baselines if way.samples_per_update == plan.samples_per_update]
    faster = {
        way.name: way.seconds_per_microbatch
        for way in same
        if not way.over_memory_bytes and way.seconds_per_microbatch * told_apart < seconds
    }
    assert not faster, f"{plan.config} takes {seconds}"
