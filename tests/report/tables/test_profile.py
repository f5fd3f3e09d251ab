"""Profiles for people: tables and the plot."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from planner.cli.main import main
from planner.formats.profile import load_profile
from planner.report.svg.profile import profile_svg
from planner.report.tables.profile import profile_report

PROFILES = Path(__file__).parents[3] / "profiles"


def _names(report: str) -> list[str]:
    return [line.split()[0] for line in report.splitlines()[report.splitlines().index(_rule(report)) + 1 :] if line]


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


@pytest.mark.parametrize("model", ["vgg16", "resnet50", "gpt2", "lstm_lm"])
def test_the_plot_is_well_formed_and_names_every_layer(model: str) -> None:
    profile = load_profile(PROFILES / model / "cpu.json")
    root = ElementTree.fromstring(profile_svg(profile))
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    for layer in profile.layers:
        assert any(title.startswith(f"{layer.name} (") for title in titles), layer.name


def test_formats_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(PROFILES / "lstm_lm" / "cpu.json")
    assert main(["show", path, "--format", "graph.txt"]) == 0
    assert capsys.readouterr().out.startswith("node1 -- Embedding(embedding) -- forward_compute_time=")
    assert main(["show", path, "--format", "svg"]) == 0
    assert capsys.readouterr().out.startswith("<svg")
    assert main(["show", path, "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")
