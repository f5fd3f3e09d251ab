"""Every verb that solves has a time limit, and shows on stderr how far the search is."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from planner.cli import output
from planner.cli.main import build_parser, main
from planner.cli.output import progress_text, searching, stopped_by_interrupt
from planner.formats.plan import load_plan
from planner.formats.profile import save_profile
from planner.options.solving import Progress
from planner.solver.clock import Clock
from tests.cli.test_surface import surface
from tests.plan.test_blocks import transformer


def test_progress_says_what_is_known() -> None:
    progress = Progress()
    assert progress_text(progress) == ""  # what is asked for is still being read
    progress.begin(time.monotonic() + 30.5, 0.0)
    assert progress_text(progress) == "no plan so far; 30 s left"
    progress.begin(time.monotonic() + 30.5, 0.5)
    progress.meet("2-2", 2.0)
    progress.meet("4", 3.0)  # slower
    assert (
        progress_text(progress)
        == "best so far 2-2, 2 s per minibatch; no plan takes less than 500 ms; 30 s left"
    )


def test_progress_is_shown_while_the_search_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "QUIET_S", 0.01)
    with searching() as progress:
        progress.meet("7-1", 1.0)
        while not (text := capsys.readouterr().err):
            time.sleep(0.01)
    assert text.startswith("best so far 7-1")


def test_a_line_that_stays_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # where stderr is a file, "no plan so far" was written every ten seconds
    shown: list[str] = []
    twice = threading.Event()

    def text_of(progress: Progress) -> str:
        shown.append(progress.step)
        if len(shown) == 4:
            twice.set()
        return "no plan so far"

    monkeypatch.setattr(output, "QUIET_S", 0.01)
    monkeypatch.setattr(output, "SELDOM_S", 0.01)
    monkeypatch.setattr(output, "progress_text", text_of)
    with searching():
        assert twice.wait(60)
    assert capsys.readouterr().err == "no plan so far\n"


@pytest.mark.parametrize("verb", ["solve", "explain", "compare", "report"])
def test_verbs_that_solve_have_a_limit(verb: str) -> None:
    parser = build_parser()
    # A report is to be there within ten seconds.
    usual = re.search(r"--time-limit TIME default: (\w+)", surface().partition(f"plan {verb}\n")[2])
    assert usual is not None
    assert usual[1] == ("7s" if verb == "report" else "60s")
    assert parser.parse_args([verb, "--time-limit", "none"]).time_limit_s == math.inf
    assert parser.parse_args([verb, "--time-limit", "250ms"]).time_limit_s == 0.25


def test_an_answer_without_time_is_no_slower_than_data_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(transformer(8, "h.{block}.part{part}"), tmp_path / "profile.json")
    arguments = ["--topology", "4x4", "--bandwidth", "1kB/s,500B/s", "--time-limit", "1ns"]
    assert main(["solve", *arguments, "--schedule", "1f1b-flush"]) == 0
    plan = load_plan(tmp_path / "plan.json")
    assert plan.predicted.speedup_over_data_parallel >= 1 - 1e-9
    assert (plan.solver.status == "optimal") == (plan.solver.gap <= 0.01)


@pytest.mark.parametrize(
    "verb",
    ["explain", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("compare", "report"))],
)
def test_every_verb_answers_when_the_time_is_over(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that a verb does has one clock, so that each of its searches meets a deadline that has
    passed.
    """
    monkeypatch.chdir(tmp_path)
    save_profile(transformer(8, "h.{block}.part{part}"), tmp_path / "profile.json")
    cluster = ("--topology", "4x4", "--bandwidth", "1kB/s,500B/s", "--memory", "100GB")
    assert main(["solve", *cluster, "--schedule", "1f1b-flush", "--time-limit", "1s"]) == 0
    assert main([verb, "--time-limit", "1ns"]) == 0
    said = {
        "explain": "The time limit ended the search",
        "compare": "waiting for messages is left out",
    }
    assert said.get(verb, "") in capsys.readouterr().out


def test_parts_of_the_time_end_with_it() -> None:
    clock = Clock.of(100.0)
    assert 49 < (clock.part(0.5).left_s or 0) <= 50
    assert 99 < (clock.at_most(1000).left_s or 0) <= 100
    assert 1 < (clock.at_most(2).left_s or 0) <= 2
    assert Clock().part(0.5).left_s is None
    assert (Clock().at_most(2).left_s or 0) > 1


def test_a_part_of_the_time_is_spent_by_computing_and_the_whole_by_waiting_too() -> None:
    """Beside other work on the machine a search computes as long as alone, as long as the whole is
    not over.
    """
    whole = Clock.of(30.0)
    parts = [whole.part(0.001), whole.at_most(0.03)]
    time.sleep(0.06)
    assert not any(part.passed for part in parts)
    began_s = time.thread_time()
    while time.thread_time() < began_s + 0.05:
        pass
    assert [each.passed for each in (*parts, whole)] == [True, True, False]
    over = Clock.of(0.01)
    time.sleep(0.02)
    assert all(each.passed for each in (over, over.part(0.5), over.at_most(1.0)))
    assert 0.5 < (over.at_least(1.0).left_s or 0) <= 1.0


def test_what_comes_after_a_part_of_the_time_has_some_left() -> None:
    """A part that takes three times as long as it computes leaves a third of their share to those
    after it.
    """
    whole = Clock.of(30.0)
    ends_s = [each.at_s or 0.0 for each in (whole.part(0.4), whole.at_most(2.0), whole)]
    assert ends_s[2] - ends_s[0] == pytest.approx(6, abs=0.1)
    assert ends_s[2] - ends_s[1] == pytest.approx(24, abs=0.1)


def test_the_first_interrupt_ends_the_search_and_the_second_one_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, stop = signal.getsignal(signal.SIGINT), threading.Event()
    with stopped_by_interrupt(stop):
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        assert "the best plan so far is the answer; Ctrl-C again" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
