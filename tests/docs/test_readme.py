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
    example = re.search(r"^    \$ plan (solve .*)\n((?:    [^$].*\n|\n)+)    \$ plan train", readme, re.MULTILINE)
    assert example is not None
    monkeypatch.chdir(ROOT)
    assert main([*example[1].split(), "-o", str(tmp_path / "plan.json")]) == 0
    shown = re.sub(r"^    ", "", example[2], flags=re.MULTILINE)
    printed = capsys.readouterr().out
    assert _without_seconds(shown) == _without_seconds(printed), f"put this into README.md:\n{printed}"


def _without_seconds(text: str) -> list[str]:
    return re.sub(r"search in .*", "search", text).splitlines()
