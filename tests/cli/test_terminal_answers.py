"""What an answer looks like on a terminal: colours, more with -v, and the next command at
its end.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from planner.cli.colours import coloured, has_colours
from planner.formats.profile import save_profile
from tests.cli.in_process import plan
from tests.samples import layer, profile

MODEL = profile(*(layer(f"h.{n}", 1, 2, output_bytes=10, weight_bytes=10**8) for n in range(4)))
CLUSTER = ("--gpus", "4", "--bandwidth", "10MB/s")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_profile(MODEL, tmp_path / "profile.json")
    return tmp_path


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colours(Terminal())
    assert not has_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours(Terminal())


def test_what_is_coloured_and_what_is_not() -> None:
    text = (
        "asynchronous (PipeDream 1F1B, gradients up to 2 updates stale)\nlimited by  stage "
        "1\nplan  2-1"
    )
    shown = coloured(text)
    assert "\x1b[33mgradients up to 2 updates stale\x1b[0m" in shown
    assert "\x1b[1mlimited by  stage 1\x1b[0m\n" in shown
    assert "\x1b[31mdoes not fit (1 GB too much)\x1b[0m" in coloured(
        "one GPU does not fit (1 GB too much)"
    )
    assert coloured("plan  2-1") == "plan  2-1"


def test_a_file_gets_no_colours(folder: Path) -> None:
    assert "\x1b" not in plan("solve", *CLUSTER, cwd=folder).stdout


def test_more_is_shown_on_demand(folder: Path) -> None:
    usual, more = (plan("solve", *CLUSTER, *flags, cwd=folder).stdout for flags in ((), ("-v",)))
    assert "\nsolver " not in usual
    assert "\nsolver " in more
    assert "\nsolver " in plan("show", "-v", cwd=folder).stdout
    few, all_rows = (plan("explain", *flags, cwd=folder).stdout for flags in ((), ("-v",)))
    assert "left out: " in few
    assert "left out: " not in all_rows
    assert len(all_rows.splitlines()) > len(few.splitlines())


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ((), "next: plan report --open, or plan train MODEL.py"),
        (
            ("-o", "a b.json"),
            "next: plan report --open --plan 'a b.json', or plan train MODEL.py --plan 'a b.json'",
        ),
    ],
)
def test_an_answer_ends_with_the_next_command(
    folder: Path, arguments: tuple[str, ...], last: str
) -> None:
    for verb in (("solve",), ("price", "--stages", "2")):
        done = plan(*verb, *CLUSTER, *arguments, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == last
        assert done.stdout.endswith("\n")


def test_equal_workers_share_a_row(folder: Path) -> None:
    assert plan("price", "--stages", "2", "--replicas", "2", *CLUSTER, cwd=folder).returncode == 0
    rows = [
        line.split()[0] for line in plan("simulate", cwd=folder).stdout.splitlines() if "%" in line
    ]
    assert {"0-1", "2-3"} <= set(rows)
