"""Profiles for people: tables, which write repeated blocks once, and notes on how they were
measured.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.main import main
from planner.formats.cluster import flat_cluster
from planner.formats.plan_parts import LONGEST_CONFIG, short_config
from planner.formats.profile import Disturbance, Profile, load_profile
from planner.reporting.tables.profile import collapsed, profile_report, shared_host_notes
from planner.reporting.tables.table import Table
from planner.solver import search_plan as solve
from tests.plan.test_blocks import transformer

MODEL = transformer(6, "h.{block}.part{part}")


def test_equal_blocks_are_one_row_per_layer() -> None:
    rows = collapsed(MODEL)
    assert [(count, layer.name) for count, layer in rows] == [
        (1, "embed"),
        *((6, f"h.*.part{part}") for part in range(4)),
        (1, "head"),
    ]
    assert sum(count * layer.forward_s for count, layer in rows) == pytest.approx(
        sum(layer.forward_s for layer in MODEL.layers)
    )
    text = profile_report(MODEL)
    assert "6 x h.*.part2" in text
    assert "h.3.part2" not in text
    assert "h.3.part2" in profile_report(MODEL, by="time")


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ("7-1", "7-1"),
        ("-".join("1" * 20), "-".join("1" * 20)),
        ("-".join("1" * 56), "56 x 1 (56 stages)"),
        ("-".join(["16"] * 32), "32 x 16 (32 stages)"),
        ("-".join(["1x8"] * 12), "12 x (1x8) (12 stages)"),
        ("-".join(["1", *["2"] * 19, *["1"] * 6]), "1, 19 x 2, 6 x 1 (26 stages)"),
        ("-".join(["1", "2"] * 20), "1-2-1-2-1-2-1-2-1-2-1-...-2 (40 stages)"),
    ],
)
def test_configs_of_many_stages_are_short(config: str, shown: str) -> None:
    assert short_config(config) == shown
    assert len(shown) <= LONGEST_CONFIG


def test_tables_fit_the_terminal() -> None:
    table = Table(
        ["stage", "layers"], [["0", "a.very.long.name.of.a.layer .. another.very.long.name (12)"]]
    )
    assert max(map(len, table.text(50).splitlines())) <= 50
    assert "a.very.lo" in table.text(50)
    assert "(12)" in table.text(50)
    assert table.text(200) == table.text()


LSTM_PROFILE = Path(__file__).parents[3] / "profiles" / "lstm_lm" / "cpu.json"


def notes(profile: Profile, *, workers: int = 2) -> list[str]:
    plan = solve(profile, flat_cluster(workers, 1e9))
    return [f"{note} {hint or ''}" for note, hint in shared_host_notes(plan, profile)]


def profiled(processes: int | None, disturbance: Disturbance | None = None) -> Profile:
    profile = load_profile(LSTM_PROFILE)
    device = profile.device.model_copy(update={"processes": processes})
    provenance = profile.provenance.model_copy(update={"disturbance": disturbance})
    return profile.model_copy(update={"device": device, "provenance": provenance})


def test_workers_that_share_a_host() -> None:
    (note,) = notes(profiled(None))
    assert "profile with: plan profile MODEL `processes=2`" in note
    assert notes(profiled(2)) == []


def test_one_worker_has_no_company() -> None:
    assert notes(profiled(None), workers=1) == []


def test_a_busy_machine() -> None:
    (note,) = notes(profiled(None, Disturbance(waited_share=0.2, drift=-0.1)), workers=1)
    for words in ("waited 20% of their time", "a second measurement took 10% less"):
        assert words in note


def test_other_devices_share_no_cores() -> None:
    profile = profiled(None)
    cuda = profile.device.model_copy(update={"kind": "cuda"})
    assert notes(profile.model_copy(update={"device": cuda})) == []


PROFILES = Path(__file__).parents[3] / "profiles"


def _names(report: str) -> list[str]:
    return [
        line.split()[0]
        for line in report.splitlines()[report.splitlines().index(_rule(report)) + 1 :]
        if line
    ]


def _rule(report: str) -> str:
    return next(line for line in report.splitlines() if line.startswith("---"))


def test_layers_by_size() -> None:
    profile = load_profile(PROFILES / "vgg16" / "cpu.json")
    assert _names(profile_report(profile)) == [layer.name for layer in profile.layers]
    by_time = _names(profile_report(profile, by="time", top=3))
    assert by_time[:3] == ["classifier.3", "features.2", "features.19"]
    assert "3 of 24 layers" in profile_report(profile, by="time", top=3)
    assert _names(profile_report(profile, by="weights", top=1))[0] == "classifier.3"
    assert _names(profile_report(profile, by="output", top=1))[0] == "features.0"


def test_formats_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(PROFILES / "lstm_lm" / "cpu.json")
    assert main(["show", path]) == 0
    assert capsys.readouterr().out.startswith("model ")
    assert main(["show", path, "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")
