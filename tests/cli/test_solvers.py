"""Solvers, kinds of GPUs and time limits from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.main import main
from planner.errors import PlanError
from planner.formats.cluster import Cluster, DeviceKind, Level, save_cluster
from planner.formats.plan import load_plan
from planner.formats.profile import save_profile
from planner.plan.trainable import check_trainable
from tests.samples import layer, profile

MODEL = profile(*(layer(name, output_bytes=10, weight_bytes=100) for name in "abcd"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_profile(MODEL, tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def solve(*arguments: str) -> int:
    return main(["solve", "--gpus", "3", "--bandwidth", "1GB/s", *arguments])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--pin", "a=2"), 2, "`plan solve` does not know --pin a=2"),
        (("--solver", "ilp", "--time-limit", "0s"), 1, "the time limit passed before any plan"),
    ],
)
def test_what_cannot_be_is_said(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    assert solve(*arguments) == code
    assert message in capsys.readouterr().err


def test_a_cluster_of_different_gpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    level = Level(size=3, bandwidth_bytes_per_s=1e9)
    save_cluster(
        Cluster(levels=(level,), kinds=(DeviceKind(count=2), DeviceKind(count=1, speed=4.0))),
        folder / "cluster.json",
    )
    assert main(["solve", "--cluster", "cluster.json"]) == 0
    printed = capsys.readouterr().out
    assert "2 of speed 1, no memory limit; 1 of speed 4, no memory limit" in printed
    assert any(2 in stage.ranks for stage in load_plan("plan.json").stages)


def test_plans_that_cannot_be_trained_are_refused(folder: Path) -> None:
    level = Level(size=2, bandwidth_bytes_per_s=1.0)
    save_cluster(
        Cluster(levels=(level,), kinds=(DeviceKind(count=1), DeviceKind(count=1, speed=9.0))),
        folder / "cluster.json",
    )
    assert main(["solve", "--cluster", "cluster.json"]) == 0
    with pytest.raises(PlanError, match="leaves GPU 0 idle"):
        check_trainable(load_plan("plan.json"))
