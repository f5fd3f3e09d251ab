"""Search == brute force again, on more and larger models than the fast tests take: every schedule,
up to 8 on 8.
"""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.layer_costs import LayerCosts
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import link_of
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.profile import Profile
from planner.options.solving import RecomputeRule, StageRules
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.registry import find
from planner.solver.problem.problem import Limits
from planner.solver.problem.replica_models import replica_model
from planner.solver.problem.result import CutPath
from planner.solver.problem.states import Chain
from planner.solver.search.chain.interleaved import InterleavedSearch
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from tests.samples import layer, profile
from tests.solver.oracle import brute_force

SCHEDULES: tuple[str, ...] = ("1f1b", "2bw", "gpipe", "1f1b-flush", "interleaved")


def random_model(rng: np.random.Generator, layers: int) -> Profile:
    """Small whole numbers, so that ties are common, and some skips."""
    names = [f"l{i}" for i in range(layers)]
    made = [
        layer(
            name,
            float(rng.integers(0, 9)) + (index == 0),
            float(rng.integers(0, 9)),
            output_bytes=int(rng.integers(1, 9)),
            weight_bytes=int(rng.integers(0, 9) * rng.integers(0, 2)),
            update_s=float(rng.integers(0, 3)),
            saved_bytes=int(rng.integers(0, 9)),
        )
        for index, name in enumerate(names)
    ]
    edges = [
        (names[i], names[j])
        for i in range(layers)
        for j in range(i + 1, layers)
        if j == i + 1 or rng.random() < 0.1
    ]
    return profile(*made, edges=edges)


def searched(
    model: Profile, cluster: Cluster, schedule: str, microbatches: int, recompute: RecomputeRule
) -> tuple[CutPath | None, bool]:
    """What the schedule's search finds, and whether it says that nothing is better."""
    space, link, gpus, memory = (
        Chain(LayerCosts(model)),
        link_of(cluster),
        cluster.gpus,
        cluster.memory_bytes,
    )
    if schedule == "interleaved":
        paths, bound_s = InterleavedSearch(
            space,
            Setting(cluster, INTERLEAVED, microbatches, 2),
            Limits(gpus, memory, StageRules(recompute)),
        ).best()
        return (paths[0], bound_s >= paths[0].seconds * (1 - 1e-9)) if paths else (None, True)
    if schedule in ("1f1b", "2bw"):
        asynchronous = replica_model(link, find(schedule), microbatches)
        return Search(space, asynchronous, Limits(gpus, memory, StageRules(recompute))).best(), True
    drained = SynchronousModel(link, find(schedule), microbatches)
    return SynchronousSearch(
        space, drained, Limits(gpus, memory, StageRules(recompute))
    ).best(), True


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("most_layers", "most_gpus", "instances"), [(5, 5, 150), (6, 6, 50), (8, 8, 60)]
)
def test_search_finds_what_brute_force_finds(
    schedule: str, most_layers: int, most_gpus: int, instances: int
) -> None:
    rng = np.random.default_rng([most_layers, SCHEDULES.index(schedule)])
    rules: tuple[RecomputeRule, ...] = (
        ("auto", "never", "always") if most_layers < 8 else ("never", "always")
    )
    plans = told = 0
    for _ in range(instances):
        model = random_model(rng, int(rng.integers(most_layers - 2, most_layers + 1)))
        gpus = int(rng.integers(max(2, most_gpus - 2), most_gpus + 1))
        microbatches = int(rng.integers(1, 10)) if schedule != "1f1b" else 1
        memory = None if rng.random() < 0.3 else int(rng.integers(20, 120))
        cluster = flat_cluster(
            gpus, float(rng.choice([0.5, 2.0, 8.0])), memory, float(rng.choice([0.0, 0.25]))
        )
        rule = rules[int(rng.integers(len(rules)))]
        path, exact = searched(model, cluster, schedule, microbatches, rule)
        expected = brute_force(
            LayerCosts(model),
            cluster,
            schedule=find(schedule),
            microbatches=microbatches,
            chunks=2 if schedule == "interleaved" else 1,
            recompute=rule,
        )
        assert (path is None) == (expected is None)
        if path is None or expected is None:
            continue
        plans, told = plans + 1, told + exact
        best_s = expected.price.seconds_per_minibatch
        assert (
            path.seconds == pytest.approx(best_s, rel=1e-9)
            if exact
            else path.seconds >= best_s * (1 - 1e-9)
        )
    assert plans > instances / 4 or schedule == "interleaved"
    assert told >= 0.8 * plans  # under interleaved, what recomputes is not always settled
