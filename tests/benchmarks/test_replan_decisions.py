"""What a run decides when its devices, links or lengths change, simulated."""

from __future__ import annotations

import pytest

from benchmarks.testbed.replan.decisions import SAME, drawn, phases


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 3, 10])
def test_most_of_the_possible_gain_is_had_soon(seed: int) -> None:
    case = drawn(seed)
    found, _ = phases(case, seed)
    assert case.what in ("device", "both", "recovers")
    for phase in found:
        if phase.possible >= 2 * SAME:
            assert 0 < phase.after <= 3
            assert phase.share >= 0.85


@pytest.mark.slow
def test_devices_are_not_blamed_for_longer_samples() -> None:
    case = drawn(4)
    (phase,), run = phases(case, 4)
    assert case.what == "lengths"
    assert phase.possible < SAME
    assert not run.moves


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_undisturbed_runs_stay(seed: int) -> None:
    _, run = phases(drawn(seed, disturbed=False), seed)
    assert not run.moves
