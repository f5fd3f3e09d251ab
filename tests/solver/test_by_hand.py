"""Hand-made cuts: legal, of as many stages as asked, and balanced in what they say they balance."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.formats.profile import Profile, load_profile
from planner.solver import by_hand as baselines
from planner.solver.problem.states import uncut_groups
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.strategies import profiles

MEASURED = sorted((Path(__file__).resolve().parents[2] / "profiles").glob("*/cpu.json"))
SIX = profile(
    *(layer(f"l{i}", 1.0 + i, 0.0, output_bytes=1, weight_bytes=10 * i) for i in range(6))
)


def ends(stages: list[Candidate]) -> list[int]:
    return [max(stage.layers) + 1 for stage in stages]


def test_by_hand() -> None:
    layer_costs = LayerCosts(SIX)
    assert ends(baselines.equal_time(layer_costs, 3)) == [3, 5, 6]  # 6, 9, 6


def test_forbidden_cuts_are_not_made() -> None:
    joined = SIX.model_copy(update={"no_cut_after": ("l1", "l3")})
    assert {2, 4}.isdisjoint(ends(baselines.equal_time(LayerCosts(joined), 3)))


@settings(max_examples=examples(150), deadline=None)
@given(model=profiles(most_layers=7), gpus=st.integers(1, 5))
def test_equal_time_is_the_best_block_partition_and_all_cuts_are_legal(
    model: Profile, gpus: int
) -> None:
    layer_costs = LayerCosts(model)
    groups = uncut_groups(layer_costs)
    legal = [group[-1] + 1 for group in groups]
    stages = min(gpus, len(groups))

    def slowest_s(cuts: tuple[int, ...]) -> float:
        times = [layer.forward_s + layer.backward_s + layer.update_s for layer in model.layers]
        return max(sum(times[i:j]) for i, j in pairwise((0, *cuts, len(times))))

    least_s = min(slowest_s(cuts) for cuts in combinations(legal[:-1], stages - 1))
    assert slowest_s(tuple(ends(baselines.equal_time(layer_costs, gpus))[:-1])) == pytest.approx(
        least_s
    )
    made = baselines.equal_time(layer_costs, gpus)
    assert len(made) == stages
    assert set(ends(made)) <= set(legal)
    assert sorted(index for stage in made for index in stage.layers) == list(
        range(len(model.layers))
    )


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.parent.name)
def test_measured_profiles(path: Path) -> None:
    layer_costs = LayerCosts(load_profile(path))
    for gpus in (2, 8):
        stages = baselines.equal_time(layer_costs, gpus)
        assert len(stages) == min(gpus, len(uncut_groups(layer_costs)))
        forbidden = {layer_costs.position[name] + 1 for name in layer_costs.profile.no_cut_after}
        assert forbidden.isdisjoint(ends(stages)[:-1])
