"""`plan simulate` from outside: the table, JSON, the trace, complaints."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.analysis.compare_runs import RunComparison
from planner.cli.main import main
from planner.formats.plan import load_plan, save_plan
from planner.reporting.tables.runs import run_report
from planner.reporting.trace import load_run, save_trace
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import Summary, summarize
from tests.cli.in_process import plan
from tests.reporting.test_trace import check_trace
from tests.simulator.plans import equal_layers, plan_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_plan(plan_of(equal_layers(2), (2, 1)), tmp_path / "plan.json")
    return tmp_path


def test_a_table_and_a_trace(folder: Path) -> None:
    done = plan("simulate", "--minibatches", "12", "--trace", "trace.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2-1, 1f1b" in done.stdout
    assert "12 minibatches in" in done.stdout
    assert "peak memory" in done.stdout
    assert done.stderr == "written to trace.json\n"
    rows = check_trace((folder / "trace.json").read_text())
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {
        "worker 0: stage 0",
        "worker 1: stage 0",
        "worker 2: stage 1",
    }
    assert load_run(folder / "trace.json").minibatches == 12


def test_json_is_the_summary(folder: Path) -> None:
    done = plan("simulate", "--json", cwd=folder)
    assert Summary.model_validate_json(done.stdout).config == "2-1"
    assert done.stderr == ""


def test_against_a_run(folder: Path) -> None:
    run = simulate(load_plan(folder / "plan.json"), 30).model_copy(update={"source": "measured"})
    save_trace(run, folder / "run.json")
    done = plan("simulate", "--against", "run.json", "--trace", "beside.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "time, relative to measured" in done.stdout
    assert load_run(folder / "beside.json").minibatches == 30
    found = RunComparison.model_validate_json(
        plan("simulate", "--against", "run.json", "--json", cwd=folder).stdout
    )
    assert found.measured.minibatches == found.simulated.minibatches == 30
    for stage in found.stages:  # but for the digits of a trace
        assert stage.measured.model_dump() == pytest.approx(stage.simulated.model_dump(), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--plan", "none.json"), "there is no file 'none.json'"),
        (("--minibatches", "0"), "--minibatches must be at least 1, got 0"),
        (("--minibatches", "many"), "invalid int value"),
        (("--against", "none.json"), "there is no file 'none.json'"),
        (
            ("--against", "plan.json", "--minibatches", "3"),
            "--minibatches cannot be combined with --against",
        ),
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
    assert main(["simulate", *arguments]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.out == ""


def test_many_workers_are_the_first_of_each_stage() -> None:
    many = plan_of(equal_layers(2), (40, 1))
    report = run_report(summarize(simulate(many, 100)), many)
    table = report.split("---\n")[-1].splitlines()
    assert [line.split()[:2] for line in table[:2]] == [["0", "0"], ["40", "1"]]
    assert "of the first worker of each stage" in report
    few = run_report(summarize(simulate(plan_of(equal_layers(1), (1,)), 1)))
    assert "too short for a steady state" in few
