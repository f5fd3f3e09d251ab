"""Constraints, solvers and time limits from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.api.running import check_trainable
from planner.cli.main import main
from planner.errors import PlanError
from planner.formats.cluster import Cluster, DeviceKind, Level, save_cluster
from planner.formats.plan import load_plan
from planner.formats.profile import save_profile
from tests.samples import layer, profile

MODEL = profile(*(layer(name, output_bytes=10, weight_bytes=100) for name in "abcd"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_profile(MODEL, tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def solve(*arguments: str) -> int:
    return main(["solve", "--gpus", "3", "--bandwidth", "1GB/s", *arguments])


def test_pins_colocations_and_forbidden_cuts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert solve("--pin", "c=1", "--colocate", "a,b", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["stages"][0]["layers"] == ["a", "b"]
    assert "c" in plan["stages"][1]["layers"]
    assert plan["solver"]["name"] == "search"
    file = folder / "constraints.json"
    file.write_text(json.dumps({"schema_version": 1, "stage_of": {"c": 1}, "together": [["a", "b"]]}))
    assert solve("--constraints", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["stages"] == plan["stages"]
    assert solve("--forbid-cut-after", "a", "--forbid-cut-after", "b", "--forbid-cut-after", "c", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["stages"]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--pin", "c"), 2, "--pin 'c' is not LAYER=STAGE"),
        (("--pin", "z=0"), 2, "layer 'z'"),
        (("--pin", "a=2"), 3, "no plan on 3 GPUs respects the constraints"),
        (("--pin-gpu", "a=1"), 2, "GPUs are all alike"),
        (("--schedule", "auto", "--solver", "ilp"), 2, "for one schedule and one profile"),
        (("--pin", "a=0", "--constraints", "x.json"), 2, "--constraints and other constraints are both given"),
        (("--solver", "ilp", "--time-limit", "0s"), 1, "the time limit passed before any plan"),
    ],
)
def test_what_cannot_be_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert solve(*arguments) == code
    assert message in capsys.readouterr().err


def test_a_cluster_of_different_gpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    level = Level(size=3, bandwidth_bytes_per_s=1e9)
    save_cluster(
        Cluster(levels=(level,), kinds=(DeviceKind(count=2), DeviceKind(count=1, speed=4.0))), folder / "cluster.json"
    )
    assert main(["solve", "--cluster", "cluster.json", "--pin-gpu", "d=2"]) == 0
    printed = capsys.readouterr().out
    assert "2 of speed 1, no memory limit; 1 of speed 4, no memory limit" in printed
    assert 2 in load_plan("plan.json").stages[-1].ranks


def test_plans_that_cannot_be_trained_are_refused(folder: Path) -> None:
    level = Level(size=2, bandwidth_bytes_per_s=1.0)
    save_cluster(
        Cluster(levels=(level,), kinds=(DeviceKind(count=1), DeviceKind(count=1, speed=9.0))), folder / "cluster.json"
    )
    assert main(["solve", "--cluster", "cluster.json"]) == 0
    with pytest.raises(PlanError, match="leaves GPU 0 idle"):
        check_trainable(load_plan("plan.json"))
