"""The README's example is what the code prints, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_is_what_plan_solve_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(
        r"^    \$ plan (solve .*)\n((?:    [^$].*\n|\n)+?)\n(?=\S)", readme, re.MULTILINE
    )
    assert example is not None
    monkeypatch.chdir(ROOT)
    assert main([*example[1].split(), "-o", str(tmp_path / "plan.json")]) == 0
    shown = re.sub(r"^    ", "", example[2], flags=re.MULTILINE)
    printed = capsys.readouterr().out
    assert _comparable(shown) == _comparable(printed), f"put this into README.md:\n{printed}"


def _comparable(text: str) -> list[str]:
    """Return the lines, without the numbers that depend on how much time there was for
    searching.
    """
    timed = ("synchronous", "solver")
    return [
        re.sub(r"[\d.]+ (ms|s)?", "", line) if line.startswith(timed) else line
        for line in text.splitlines()
    ]
