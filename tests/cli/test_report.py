"""`plan report` from outside: the file, what is in it, complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli.main import main
from planner.formats.cluster import flat_cluster
from planner.formats.plan import load_plan, save_plan
from planner.formats.profile import save_profile
from planner.reporting.trace import save_trace
from planner.simulator.simulate_plan import simulate
from planner.solver import search_plan as solve
from tests.cli.in_process import plan
from tests.cli.test_main import MODEL
from tests.reporting.page.test_page import Elements, slower


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_profile(MODEL, tmp_path / "profile.json")
    save_plan(solve(MODEL, flat_cluster(3, 1.25e8)), tmp_path / "plan.json")
    return tmp_path


def headings(path: Path) -> set[str]:
    """What the page's navigation names."""
    elements = Elements(path.read_text(encoding="utf-8"))
    return {attributes["id"] or "" for tag, attributes in elements.found if tag == "section"}


def test_all_of_it_with_the_defaults(folder: Path) -> None:
    done = plan("report", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    # a slow machine shows its progress before
    assert done.stderr.splitlines()[-1] == "written to report.html"
    assert headings(folder / "report.html") == {
        "summary",
        "limits",
        "stages",
        "timeline",
        "memory",
        "comparison",
    }


def test_a_run_beside_it(folder: Path) -> None:
    save_trace(slower(simulate(load_plan(folder / "plan.json"), 7), 1.1), folder / "run.json")
    done = plan("report", "--run", "run.json", "-o", "both.html", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "measured" in headings(folder / "both.html")
    assert "7 minibatches, simulated and measured" in (folder / "both.html").read_text()


def test_without_the_profile_it_says_what_is_missing(folder: Path) -> None:
    (folder / "profile.json").unlink()
    assert plan("report", cwd=folder).returncode == 0
    assert "missing" in headings(folder / "report.html")
    assert "there is no profile.json" in (folder / "report.html").read_text()
    save_profile(MODEL.model_copy(update={"model": "other"}), folder / "profile.json")
    assert plan("report", cwd=folder).returncode == 0
    assert "was made from another profile" in (folder / "report.html").read_text()
    named = plan("report", "--profile", "profile.json", cwd=folder)
    assert named.returncode == 2
    assert "was made from another profile" in named.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--plan", "none.json"), "there is no file 'none.json'"),
        (("--profile", "none.json"), "there is no file 'none.json'"),
        (("--run", "none.json"), "there is no file 'none.json'"),
        (("--run", "plan.json"), "holds a plan, not a timeline"),
        (("--minibatches", "0"), "--minibatches must be at least 1, got 0"),
        (("-o", "report.pdf"), "'report.pdf' is no name of a report, which is HTML"),
    ],
)
def test_wrong_input(
    folder: Path,
    arguments: tuple[str, ...],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(["report", *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert not (folder / "report.html").exists()


def test_a_run_of_another_plan_is_refused(folder: Path) -> None:
    save_trace(slower(simulate(load_plan(folder / "plan.json"), 7), 1.1), folder / "run.json")
    content = json.loads((folder / "run.json").read_text())
    content["otherData"]["timeline"]["schedule"] = "gpipe"
    (folder / "run.json").write_text(json.dumps(content))
    done = plan("report", "--run", "run.json", cwd=folder)
    assert done.returncode == 2
    assert "its schedule 'gpipe' is not the plan's '1f1b'" in done.stderr
