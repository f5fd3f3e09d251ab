"""`plan solve --run`: the second run is planned from the first."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from planner.formats.cluster import flat_cluster
from tests.analysis.test_measured_cluster import run_on, slower
from tests.cli.in_process import plan

PROFILE = Path(__file__).parents[2] / "profiles" / "vgg16" / "cpu.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, and its run on a cluster whose workers 0 and 1 are half as fast."""
    folder = tmp_path_factory.mktemp("measured")
    profile = planner.load_profile(PROFILE)
    planner.save_profile(profile, folder / "profile.json")
    solved = planner.solve(profile, flat_cluster(4, "1Gbps"), max_stages=4)
    planner.save_plan(solved, folder / "plan.json")
    slow = slower(solved.cluster, 0.5, 0.5, 1.0, 1.0)
    planner.save_timeline(run_on(solved, slow), folder / "run.json")
    return folder


def test_the_next_plan_is_for_the_cluster_as_it_was_found(folder: Path) -> None:
    done = plan("solve", "--run", "run.json", "-o", "next.json", cwd=folder)

    assert done.returncode == 0, done.stderr
    assert "measured: worker 1 (stage 0) takes 2.00 times as long as planned" in done.stderr
    assert "times as fast there as the plan that was run" in done.stderr
    solved = planner.load_plan(folder / "next.json")
    assert [kind.speed for kind in solved.cluster.kinds] == [pytest.approx(0.5, rel=0.02), 1.0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--run", "run.json", "--gpus", "4"), "`--gpus` describes another"),
        (("--run", "plan.json"), "'plan.json' holds a plan, not a timeline"),
        (("--run", "run.json", "--plan", "other.json"), "other.json"),
        (("--run", "missing.json"), "missing.json"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    done = plan("solve", *arguments, "-o", "refused.json", cwd=folder)
    assert done.returncode == 2
    assert expected.replace("`", "") in done.stderr
    assert "hint: " in done.stderr
    assert not (folder / "refused.json").exists()
