"""Plans under a memory limit leave room for what devices hold beside tensors, against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.layer_costs import LayerCosts
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Profile
from planner.solver.find_plan import solve
from tests.cost.test_overheads import on_cuda
from tests.samples import layer, profile
from tests.solver.oracle import brute_force

MB = 10**6


def random_model(rng: np.random.Generator) -> Profile:
    """Layers of some hundred MB, beside which a communicator counts."""
    layers = [
        layer(
            f"l{index}",
            forward_s=float(rng.integers(1, 9)),
            output_bytes=int(rng.integers(1, 20)) * MB,
            weight_bytes=int(rng.integers(1, 400)) * MB,
            saved_bytes=int(rng.integers(1, 400)) * MB,
        )
        for index in range(int(rng.integers(2, 6)))
    ]
    return on_cuda(profile(*layers), context_bytes=300 * MB)


def test_plans_fit_with_all_overheads_and_are_as_fast_as_brute_force_says() -> None:
    rng = np.random.default_rng(0)
    as_fast = worse = none = limited = 0
    for _ in range(100):
        model, gpus = random_model(rng), int(rng.integers(1, 6))
        cluster = flat_cluster(gpus, 1e9, memory_bytes=int(rng.integers(1500, 5000)) * MB)
        expected = brute_force(LayerCosts(model), cluster, model="pipedream", in_order=True)
        of_tensors = brute_force(LayerCosts(model).of_tensors, cluster, model="pipedream", in_order=True)
        try:
            plan = solve(model, cluster, cost_model="pipedream")
        except InfeasibleError:
            none += expected is None
            worse += expected is not None
            continue
        assert expected is not None
        assert all(plan.memory_bytes(number) <= (cluster.memory_bytes or 0) for number in range(len(plan.stages)))
        seconds, best_s = plan.predicted.seconds_per_minibatch, expected.price.seconds_per_minibatch
        assert plan.solver.lower_bound_s <= best_s * (1 + 1e-9)
        limited += of_tensors is not None and best_s > of_tensors.price.seconds_per_minibatch * (1 + 1e-9)
        if plan.solver.status == "optimal":
            assert seconds == pytest.approx(best_s, rel=1e-9)
        as_fast += seconds <= best_s * (1 + 1e-9)
        worse += seconds > best_s * (1 + 1e-9)
    assert limited > 5, "the overheads decide some plans"
    assert none > 5
    assert as_fast > 15 * worse
