"""Sessions that the pages show are what the commands print, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import recording, write_pages
from planner.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
SESSIONS = sorted(recording.SESSIONS.glob("*.txt"))
# of which no command needs a package that CI does not have, or more than a few seconds
QUICK = ("solve-vgg",)


@pytest.mark.parametrize("name", QUICK)
def test_a_session_is_what_its_commands_print(name: str) -> None:
    session = (recording.SESSIONS / f"{name}.txt").read_text(encoding="utf-8")
    printed = recording.recorded(recording.commands(session))
    assert _comparable(session) == _comparable(printed), f"python -m docs.recording {name}"


def _comparable(text: str) -> list[str]:
    """Return the lines, without the numbers that depend on how much time there was for
    searching.
    """
    timed = ("synchronous", "solver")
    return [
        re.sub(r"[\d.]+ (ms|s)?", "", line) if line.startswith(timed) else line
        for line in text.splitlines()
    ]


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_commands_of_sessions_are_ones_that_plan_takes(path: Path) -> None:
    typed = recording.commands(path.read_text(encoding="utf-8"))
    assert typed
    for command in typed:
        if command.startswith("cd "):
            continue
        words = command.replace("\\\n", " ").partition("|")[0].split()
        build_parser().parse_args(words[1:])  # raises, with what is wrong


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_every_session_is_shown(path: Path) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    marks = (f"<!-- recording: {path.stem} ", f"images/{path.stem}.svg")
    assert any(mark in page.read_text(encoding="utf-8") for page in pages for mark in marks)


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_no_answer_depends_on_how_fast_the_machine_was(path: Path) -> None:
    session = path.read_text(encoding="utf-8")
    assert [words for words in recording.TIME_ENDED if words in session] == []


def test_an_answer_that_was_cut_short_is_not_recorded() -> None:
    with pytest.raises(SystemExit, match="how fast this machine is"):
        recording.recorded(["echo note: 4 GPUs: not tried, the time ended"])


def test_a_folder_is_prepared_and_changed(tmp_path: Path) -> None:
    script = tmp_path / "prepare.sh"
    script.write_text('mkdir inner; basename "$1" >inner/who', encoding="utf-8")
    session = recording.recorded(["cd inner", "cat who"], script)
    assert session == f"$ cd inner\n\n$ cat who\n{ROOT.name}\n"


@pytest.mark.parametrize("name", recording.PICTURES)
def test_a_picture_shows_its_session(name: str) -> None:
    session = (recording.SESSIONS / f"{name}.txt").read_text(encoding="utf-8")
    drawn = (recording.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == recording.picture(session), f"python -m docs.recording {name}"


def test_continued_commands_are_one() -> None:
    session = "$ plan solve \\\n    --gpus 4\nanswer\n\n$ plan show\nanswer\n"
    assert recording.commands(session) == ["plan solve \\\n    --gpus 4", "plan show"]


def test_a_picture_has_the_colours_of_a_terminal_and_no_markup_of_the_answer() -> None:
    drawn = recording.picture("$ plan fit <model>\nDP=8 does not fit (1 GB too much)\n")
    assert "&lt;model&gt;" in drawn
    assert '<tspan style="fill:#ff7b72">does not fit (1 GB too much)</tspan>' in drawn


def test_long_lines_are_wrapped() -> None:
    # a note of 210 characters made the text of the README's picture too small to read
    note = "note: " + "word " * 60
    drawn = recording.picture(f"$ plan fit\n{note}\nlimited by  {'link ' * 40}\n")
    rows = re.findall(r">([^<>]*)</(?:text|tspan)>", drawn)
    assert max(map(len, rows)) <= recording.COLUMNS
    assert "      word word" in drawn  # below "note: "
    assert drawn.count("word") == 60


def test_sessions_stand_in_the_pages() -> None:
    assert write_pages.recording("solve-vgg").startswith("```text\n$ plan solve --profile ")
    first = recording.commands(
        (recording.SESSIONS / "compare-schedules.txt").read_text(encoding="utf-8")
    )[0]
    alone = write_pages.recording("compare-schedules 1")
    assert alone.startswith(f"```text\n$ {first}\n")
    assert alone.count("$ ") == 1
