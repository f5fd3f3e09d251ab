"""The tour a new user takes first, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.demo.quickstart import miss_words
from planner.formats.plan import load_plan
from planner.formats.profile import load_profile
from tests.cli import in_process


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder`."""
    command = [sys.executable, "-m", "planner", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.slow
def test_the_tour_leaves_what_the_next_commands_need(tmp_path: Path) -> None:
    process = plan(tmp_path, "quickstart", "--gpus", "2", "--steps", "40", "--json")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    for run in (result["pipeline"], result["data_parallel"]):
        assert run["samples_per_s"] > 0
        assert run["minibatches"] == 40
        assert not run["random_data"]
        losses = [entry["loss"] for entry in run["losses"]]
        assert all(loss > 0 for loss in losses)
    folder = tmp_path / "quickstart"
    assert (
        load_plan(folder / "plan.json").profile_digest
        == load_profile(folder / "profile.json").digest
    )
    shown = plan(folder, "show", "plan.json")
    assert shown.returncode == 0
    assert result["plan"]["config"] in shown.stdout
    solved = plan(folder, "solve", "--gpus", "2", "--bandwidth", "1Gbps")
    assert solved.returncode == 0, solved.stderr
    trained = plan(folder, "train", "model.py", "--steps", "12")
    assert trained.returncode == 0, trained.stderr


def test_numbers_that_make_no_sense_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for option in ("--gpus", "--steps"):
        process = in_process.plan("quickstart", option, "0", cwd=tmp_path)
        assert process.returncode == 2
        assert process.stderr.startswith(f"error: {option} 0 is too small\nhint: ")
    assert not (tmp_path / "quickstart").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (-0.09, "The prediction for plan is 9% too low: runs this short vary"),
        (0.2, "is 20% too high"),
        (0.04, ""),
    ],
)
def test_a_prediction_that_misses_is_said(error: float, words: str) -> None:
    assert words in (told := miss_words("plan", error))
    assert bool(told) == bool(words)


def test_the_folder_of_an_earlier_tour_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    refused = in_process.plan("quickstart", "--gpus", "0", cwd=tmp_path)
    assert refused.stderr.startswith("error: --gpus 0 is too small")
