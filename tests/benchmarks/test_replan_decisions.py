"""What a run decides when its devices and links change, simulated: see `decisions`."""

from __future__ import annotations

import pytest

from tests.campaigns.drift.decisions import decided, drawn


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 4, 6, 8, 10])
def test_most_of_the_possible_gain_is_had_after_two_windows(seed: int) -> None:
    case = drawn(seed)
    found = decided(case, seed)
    assert case.what in ("device", "both")
    if found.possible >= 0.1:
        assert found.moved
        assert found.windows == 2
        assert found.share >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 7, 11])
def test_undisturbed_runs_stay(seed: int) -> None:
    case = drawn(seed)
    found = decided(case, seed)
    assert case.what == "nothing"
    assert found.windows == 0
    assert not found.moved
