"""Plans under a memory limit leave room for what devices hold beside tensors, against brute
force.
"""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster
from planner.formats.files import replace
from planner.formats.profile import Profile
from planner.options.solving import StageRules
from planner.schedule.registry import find
from planner.solver.find_plan import search_plan as solve
from planner.solver.problem.problem import Problem
from tests.cost.test_overheads import on_cuda
from tests.cost.test_weight_copies import tied
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.brute import brute_force as every_plan
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
    for _ in range(examples(300)):
        model, gpus = random_model(rng), int(rng.integers(1, 6))
        cluster = flat_cluster(gpus, 1e9, memory_bytes=int(rng.integers(1500, 5000)) * MB)
        expected = brute_force(LayerCosts(model), cluster)
        of_tensors = brute_force(LayerCosts(model).of_tensors, cluster)
        try:
            plan = solve(model, cluster)
        except InfeasibleError:
            none += expected is None
            worse += expected is not None
            continue
        assert expected is not None
        assert all(
            plan.memory_bytes(number) <= (cluster.memory_bytes or 0)
            for number in range(len(plan.stages))
        )
        seconds, best_s = plan.solver.cost_model_s or 0, expected.price.seconds_per_minibatch
        assert plan.solver.lower_bound_s <= best_s * (1 + 1e-9)
        limited += of_tensors is not None and best_s > of_tensors.price.seconds_per_minibatch * (
            1 + 1e-9
        )
        if plan.solver.status == "optimal":
            assert seconds == pytest.approx(best_s, rel=1e-9)
        as_fast += seconds <= best_s * (1 + 1e-9)
        worse += seconds > best_s * (1 + 1e-9)
    assert limited > 2, "the overheads decide some plans"
    assert none > 2
    assert as_fast > 15 * worse


@pytest.mark.parametrize(
    ("schedule", "memory_mb", "bandwidth", "rows"),
    [
        (
            "1f1b-flush",
            1437,
            1e10,
            [(0.335, 0.1, 22, 195, 390, 121), (0.76, 0.707, 1, 194, 194, 126)],
        ),
        (
            "2bw",
            1100,
            1e9,
            [
                (0.37, 1.8, 16, 142, 142, 57),
                (0.4, 1.5, 29, 114, 0, 52),
                (0.55, 1.62, 15, 14, 28, 24),
            ],
        ),
    ],
)
def test_plans_without_replicas_are_found_where_others_lack_room_for_communicators(
    schedule: str,
    memory_mb: int,
    bandwidth: float,
    rows: list[tuple[float, float, int, int, int, int]],
) -> None:
    layers = [
        layer(
            f"l{n}",
            forward,
            backward,
            output_bytes=sent * MB,
            weight_bytes=weights * MB,
            saved_bytes=saved * MB,
        ).model_copy(update={"gradient_bytes": weights * MB, "optimizer_bytes": state * MB})
        for n, (forward, backward, sent, weights, state, saved) in enumerate(rows)
    ]
    model = on_cuda(profile(*layers), context_bytes=100 * MB)
    cluster = flat_cluster(5, bandwidth, memory_bytes=memory_mb * MB)
    problem = Problem(LayerCosts(model), Setting(cluster, find(schedule), 8), StageRules())
    expected = every_plan(problem)
    assert expected is not None
    plan = solve(model, cluster, schedule=schedule, microbatches=8, depth="published")
    assert plan.solver.cost_model_s == pytest.approx(expected.seconds)
    assert all(plan.memory_bytes(number) <= memory_mb * MB for number in range(len(plan.stages)))


def test_copies_of_a_weight_fit_with_what_a_gpu_keeps_besides() -> None:
    """A share of all that a GPU keeps grows with the copies, too."""
    small = on_cuda(tied())
    large = [
        replace(
            each,
            weight_bytes=factor * each.weight_bytes,
            optimizer_bytes=factor * (each.optimizer_bytes or 0),
        )
        # The copy is in the stage that holds most.
        for each, factor in zip(small.layers, (200, 200, 600, 200), strict=True)
    ]
    model = replace(small, layers=tuple(large))

    with_copies = 0
    for memory_bytes in range(3000 * MB, 6000 * MB, 3000 * MB // examples(600)):
        cluster = flat_cluster(2, 1e12, memory_bytes=memory_bytes)
        try:
            plan = solve(model, cluster, schedule="1f1b-flush", microbatches=4)
        except InfeasibleError:
            continue
        assert not any(map(plan.lacking_bytes, range(len(plan.stages)))), memory_bytes
        with_copies += bool(plan.shared)
    assert with_copies
