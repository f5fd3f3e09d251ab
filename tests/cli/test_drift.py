"""`plan train` and what it is told about keeping to the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import planner
from planner.formats.cluster import flat_cluster
from tests.cli.in_process import plan
from tests.executor.sleeping import sleeping_plan, sleeping_profile, slow_down, write_sleeping

pytestmark = pytest.mark.usefixtures("warm_start")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, a plan for it, its profile, and another profile."""
    profile = sleeping_profile(write_sleeping(tmp_path))
    planner.save_profile(sleeping_profile(tmp_path / "sleeping.py", 0.1), tmp_path / "other.json")
    planner.save_profile(profile, tmp_path / "profile.json")
    made = sleeping_plan(profile, (1, 1), "1f1b-flush", 6, flat_cluster(2, 1e9))
    planner.save_plan(made, tmp_path / "plan.json")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--profile", "other.json"), "was solved from another profile than --profile other.json"),
        (("--profile", "missing.json"), "missing.json"),
        (("--replan", "--drift-window", "0"), "--drift-window 0 never looks"),
        (("--drift-window", "-1"), "--drift-window"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    done = plan("train", "sleeping.py", "--steps", "4", *arguments, cwd=folder)
    assert done.returncode == 2
    assert expected in done.stderr


def test_to_move_needs_the_profile(folder: Path) -> None:
    (folder / "other.json").rename(folder / "profile.json")
    done = plan("train", "sleeping.py", "--steps", "4", "--replan", cwd=folder)
    assert done.returncode == 2
    assert "there is no profile that the plan was solved from" in done.stderr
    assert "hint: give its --profile" in done.stderr


@pytest.mark.slow
def test_the_summary_says_what_was_not_as_planned(folder: Path) -> None:
    slow_down(folder, [(1, 0, 10**9, 2.5)])
    given = ("--steps", "75", "--drift-window", "10", "--trace", "run.json")

    done = plan("train", "sleeping.py", *given, cwd=folder)

    assert done.returncode == 0, done.stderr
    assert "not as planned" in done.stdout
    assert "(stage 1) on host" in done.stdout
    report = plan("report", "--run", "run.json", "--json", cwd=folder)
    assert report.returncode == 0, report.stderr
    page = Path(folder / json.loads(report.stdout)["written"]).read_text("utf-8")
    assert "its devices and links were not as planned" in page
