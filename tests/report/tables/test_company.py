"""What a plan's user is told of the company that its profile was measured in."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.formats.cluster import flat_cluster
from planner.formats.profile import Disturbance, Profile, load_profile
from planner.report.tables.company import NOT_MODELLED, company_notes
from planner.solver import solve

PROFILE = Path(__file__).parents[3] / "profiles" / "lstm_lm" / "cpu.json"


def notes(profile: Profile, *, workers: int = 2, overlap: bool = True) -> list[str]:
    plan = solve(profile, flat_cluster(workers, 1e9, overlap=overlap))
    return [f"{note} {hint or ''}" for note, hint in company_notes(plan, profile)]


def profiled(processes: int | None, disturbance: Disturbance | None = None) -> Profile:
    profile = load_profile(PROFILE)
    device = profile.device.model_copy(update={"processes": processes})
    provenance = profile.provenance.model_copy(update={"disturbance": disturbance})
    return profile.model_copy(update={"device": device, "provenance": provenance})


@pytest.mark.parametrize(
    ("processes", "overlap", "words"),
    [
        (None, True, "profile with: plan profile MODEL `processes=2`"),
        (2, True, "give `overlap=False`, or measure the links"),
        (2, False, NOT_MODELLED),
    ],
)
def test_workers_that_share_a_host(processes: int | None, overlap: bool, words: str) -> None:
    (note,) = notes(profiled(processes), overlap=overlap)
    assert words in note


def test_one_worker_has_no_company() -> None:
    assert notes(profiled(None), workers=1) == []


def test_a_busy_machine() -> None:
    (note,) = notes(profiled(None, Disturbance(waited_share=0.2, others_cores=1.5, drift=-0.1)), workers=1)
    for words in ("other processes used 1.5 cores", "waited 20% of their time", "a second measurement took 10% less"):
        assert words in note


def test_other_devices_share_no_cores() -> None:
    profile = profiled(None)
    cuda = profile.device.model_copy(update={"kind": "cuda"})
    assert notes(profile.model_copy(update={"device": cuda})) == []
