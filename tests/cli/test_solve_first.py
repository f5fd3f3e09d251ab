"""`plan train MODEL --gpus N`: one command that profiles, solves, says the verdict and trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.formats.plan import load_plan
from planner.formats.profile import load_profile
from tests.cli.in_process import plan
from tests.executor.models import write_model

pytestmark = pytest.mark.usefixtures("warm_start")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, "convolutional", "sgd").rename(tmp_path / "model.py")
    return tmp_path


def test_a_model_is_profiled_solved_for_and_trained(folder: Path) -> None:
    given = ("--gpus", "2", "--bandwidth", "10Gbps", "--batch-size", "4", "--steps", "6")
    done = plan("train", "model.py", *given, "--schedule", "1f1b-flush", "--json", cwd=folder)

    assert done.returncode == 0, done.stderr
    solved = load_plan(folder / "plan.json")
    assert str(solved.schedule) == "1f1b-flush"
    assert solved.profile_digest == load_profile(folder / "profile.json").digest
    assert solved.cluster.levels[0].bandwidth_bytes_per_s == 1.25e9
    result = json.loads(done.stdout)
    assert result["config"] == solved.config
    assert len(result["losses"]) == 6
    assert "written to profile.json and plan.json" in done.stderr


@pytest.mark.slow
def test_the_link_is_measured_where_no_bandwidth_is_given(folder: Path) -> None:
    done = plan("train", "model.py", "--gpus", "2", "--batch-size", "4", "--steps", "4", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert load_plan(folder / "plan.json").cluster.backend == "gloo"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--bandwidth", "10Gbps"), "--bandwidth is for a plan that is solved for first"),
        (("--gpus", "2", "--resume"), "for a new run on this host alone"),
        (("--gpus", "2", "--elastic", "1:2"), "for a new run on this host alone"),
        (("--gpus", "0"), "0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    done = plan("train", "model.py", *arguments, cwd=folder)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "hint: " in done.stderr
    assert not (folder / "plan.json").exists()
