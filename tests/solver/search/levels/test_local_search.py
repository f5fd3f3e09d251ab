"""Local search, and what it brings on clusters of several levels."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path as File

import numpy as np
import pytest

from planner.cost.candidate import StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.profile import Profile, load_profile
from planner.solver import search_plan as solve
from planner.solver.problem.result import CutPath, stages_along
from planner.solver.problem.states import Chain
from planner.solver.search.levels.local_search import LocalSearch
from planner.solver.tuning.record import STANDARD
from tests.samples import layer, profile

PROFILES = File(__file__).parents[4] / "profiles"
SHARES = STANDARD.levels.split_shares


def plainly(_: tuple[int, ...], replicas: tuple[int, ...]) -> tuple[StageOptions, ...]:
    return tuple(map(StageOptions, replicas))


def seconds_on(
    profile: Profile, cluster: Cluster
) -> tuple[Chain, dict[CutPath, float], LocalSearch]:
    """The cuts, what was priced, and local search by the cost model."""
    layer_costs = LayerCosts(profile)
    space, priced = Chain(layer_costs), dict[CutPath, float]()

    def seconds(path: CutPath) -> float:
        assert path not in priced
        found = price(
            layer_costs, stages_along(space, path), Setting(cluster)
        ).seconds_per_minibatch
        assert path.gpus <= cluster.gpus
        priced[path] = found
        return priced[path]

    return space, priced, LocalSearch(space, cluster.gpus, seconds, [plainly], 500, SHARES)


def test_a_single_stage_becomes_a_balanced_pipeline() -> None:
    """Eight equal layers with heavy weights, for two GPUs whose link is no limit but for
    weights.
    """
    even = profile(*(layer(f"l{i}", output_bytes=1, weight_bytes=10**6) for i in range(8)))
    space, priced, descents = seconds_on(even, flat_cluster(2, 1e5))
    found = descents.from_(CutPath((0, 8), (StageOptions(1),), np.inf))
    assert found is not None
    assert (found.states, found.replicas) == ((0, 4, 8), (1, 1))
    assert found.seconds == min(priced.values()) == 12.0
    assert len(space) == 9


def test_it_never_prices_a_plan_twice_and_keeps_its_number() -> None:
    uneven = profile(
        *(layer(f"l{i}", 1 + i % 3, 2, output_bytes=7, weight_bytes=100) for i in range(12))
    )
    _, priced, descents = seconds_on(uneven, hierarchical_cluster((2, 2), (50.0, 5.0)))
    starts = [
        CutPath((0, 12), (StageOptions(4),), np.inf),
        CutPath(
            (0, 3, 12),
            (
                StageOptions(1),
                StageOptions(3),
            ),
            np.inf,
        ),
    ]
    first, second = (descents.from_(start) for start in starts)
    assert first is not None
    assert second is not None
    assert descents.from_(starts[0]) == first
    assert len(priced) < 500
    limited = LocalSearch(
        Chain(LayerCosts(uneven)), 4, lambda path: 1.0 / len(path.states), [plainly], 3, SHARES
    )
    assert limited.from_(starts[0]) is not None
    assert limited.over


def test_where_nothing_fits_there_is_no_answer() -> None:
    two = profile(layer("a", output_bytes=1), layer("b"))
    descents = LocalSearch(Chain(LayerCosts(two)), 2, lambda _: np.inf, [plainly], 100, SHARES)
    assert descents.from_(CutPath((0, 2), (StageOptions(2),), np.inf)) is None


@pytest.mark.parametrize("model", [pytest.param("resnet50", marks=pytest.mark.slow), "gnmt8"])
def test_faster_links_between_servers_are_hardly_slower(model: str) -> None:
    """Where the bounds tell plans apart badly, since the devices of a server share its link.

    A plan whose gradients are less stale may be 5% slower.
    """
    made = load_profile(PROFILES / model / "cpu.json")
    plans = [
        solve(made, hierarchical_cluster((4, 2), (10e9 / 8, bandwidth)))
        for bandwidth in (100e6 / 8, 130e6 / 8, 142e6 / 8)
    ]
    for slower, faster in pairwise(plans):
        less_stale = faster.staleness < slower.staleness
        most_s = slower.predicted.seconds_per_minibatch * (1.05 if less_stale else 1.01)
        assert faster.predicted.seconds_per_minibatch <= most_s


@pytest.mark.slow
def test_the_answer_is_the_same_without_a_time_limit() -> None:
    """The less stale plan of which the searches know nothing is a regular one."""
    made = load_profile(PROFILES / "resnet50" / "cpu.json")
    cluster = hierarchical_cluster((4, 2), (10e9 / 8, 130e6 / 8))
    limited, unlimited = solve(made, cluster), solve(made, cluster, time_limit_s=None)
    assert limited.config == unlimited.config
    assert limited.notes == unlimited.notes
