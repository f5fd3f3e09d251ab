"""The process that solves again: it answers, waits for the next question, and ends with the run."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import pytest

from planner.errors import InputError, PlannerError
from planner.executor.run.drift_watch import ANSWER, LEFT_OUT, LONGER
from planner.executor.run.solver_process import SolverProcess
from planner.formats.drift import Corrected
from planner.formats.files import load_record
from planner.formats.plan import save_plan
from planner.formats.profile import save_profile
from planner.formats.timeline import save_timeline
from planner.simulator.simulate_plan import simulate
from tests.executor.sleeping import sleeping_plan, sleeping_profile, write_sleeping

MINIBATCHES = 10


@pytest.fixture
def question(tmp_path: Path) -> Path:
    """A folder with a run that is as it was planned."""
    profile = sleeping_profile(write_sleeping(tmp_path))
    save_profile(profile, tmp_path / "profile.json")
    plan = sleeping_plan(profile, (1, 1), "1f1b-flush", 6)
    save_plan(plan, tmp_path / "plan.json")
    save_timeline(simulate(plan, MINIBATCHES), tmp_path / "run.json")
    for name in (LONGER, LEFT_OUT):
        (tmp_path / name).write_text(json.dumps({}), encoding="utf-8")
    return tmp_path


def answer_of(folder: Path) -> Corrected:
    return load_record(Corrected, folder / ANSWER, InputError, "")


@pytest.mark.parametrize("ready", [False, True])
def test_each_question_is_answered(question: Path, ready: bool) -> None:
    solver = SolverProcess(str(question / "profile.json"), ready=ready)
    for _ in range(2):
        solver.answer(question)
        assert answer_of(question).expected_s > 0
        (question / ANSWER).unlink()
    solver.end()


def test_the_next_one_is_ready_and_ends_with_the_run(question: Path) -> None:
    solver = SolverProcess(str(question / "profile.json"), ready=True)
    first = solver._process
    assert first is not None
    solver.answer(question)
    assert first.returncode == 0
    second = solver._process
    assert second is not None
    assert second.poll() is None

    solver.end()

    assert second.returncode is not None
    with pytest.raises(PlannerError, match="the run ended before"):
        solver.answer(question)


def test_it_ends_where_the_run_was_killed(question: Path) -> None:
    solver = SolverProcess(str(question / "profile.json"), ready=True)
    process = solver._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does
    assert process.wait(timeout=60) == 0
    process.stdin = None
    solver.end()


def test_what_is_wrong_is_told(question: Path) -> None:
    solver = SolverProcess(str(question / "other.json"), ready=False)
    with pytest.raises(PlannerError, match=r"other\.json"):
        solver.answer(question)


def test_a_search_is_given_up_at_the_end(question: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = ["sleep", "600"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **pipes: popen(hangs, **pipes))
    solver = SolverProcess("profile.json", ready=True)
    failures: list[str] = []

    def ask() -> None:
        try:
            solver.answer(question)
        except PlannerError as error:
            failures.append(error.message)

    thread = threading.Thread(target=ask)
    thread.start()
    while not solver._asking:
        thread.join(0.01)
    solver.end()
    thread.join(60)
    assert failures == ["the search was ended"]
