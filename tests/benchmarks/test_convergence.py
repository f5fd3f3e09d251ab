"""The parts of the benchmark of convergence that need no training."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from benchmarks.convergence import __main__ as command
from benchmarks.convergence import characters, digits
from benchmarks.convergence.__main__ import Curve, Measured, curves_of, make_plan, ordered, read_results, save, table
from benchmarks.convergence.picture import curves_svg

CURVES = [Curve("one process", [10, 20], [2.0, 1.0], None), Curve("1f1b & co", [10, 20], [2.1, 1.03], None)]


def test_the_picture_has_a_line_for_each_curve() -> None:
    root = ET.fromstring(curves_svg("losses", curves_of(CURVES)))
    lines = [each for each in root if each.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 2]
    assert "1f1b & co" in [each.text for each in root]


def test_the_table_says_what_is_missed() -> None:
    rows = list(table("characters", CURVES))
    assert rows[0].endswith("reached |")
    assert rows[1] == "| characters | 1f1b & co | 1.0300 | +3.0% |  | missed |"
    (row,) = table("digits", [Curve("one process", [1], [0.1], 0.98)])
    assert "98.0% | reached" in row


def test_results_are_kept_from_one_command_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "HERE", tmp_path)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(command, "DOCS", tmp_path / "images")
    assert read_results() == {}
    results = {"characters": Measured("AdamW", ordered([Curve("naive", [10], [1.0], None), CURVES[0]]))}
    save(results)
    assert read_results() == results
    assert [curve.name for curve in results["characters"].curves] == ["one process", "naive"]
    assert (tmp_path / "images" / "convergence-characters.svg").exists()
    assert (tmp_path / "results.md").read_text().endswith("characters: AdamW.\n")


def test_held_out_text_is_not_trained_on() -> None:
    trained, held_out = characters.dataset(), characters.evaluation_dataset()
    assert len(trained) > 15 * len(held_out) > 1000  # type: ignore[arg-type]
    inputs, target = held_out[0]
    assert torch.equal(inputs[1:], target[:-1])
    assert int(inputs.max()) < characters.CHARACTERS
    assert digits.MINIBATCHES % digits.EVERY == 0


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "interleaved"])
def test_plans_have_four_stages(schedule: str) -> None:
    plan = make_plan(digits, schedule, vertical_sync=False)
    assert len(plan.stages) == 4
    assert plan.workers == (2 if schedule == "interleaved" else 4)
