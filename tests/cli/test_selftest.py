"""The self-test at the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.selfcheck.run import SelftestReport
from tests.cli import in_process


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "planner", "selftest", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_the_chosen_checks_are_run_and_told() -> None:
    done = plan("--device", "cpu", "--only", "links", "--json")
    assert done.returncode == 0, done.stderr
    report = SelftestReport.model_validate_json(done.stdout)
    assert [(row.name, row.result) for row in report.rows] == [
        ("gloo", "passed"),
        ("nccl", "skipped"),
    ]
    assert done.stderr.startswith("passed  links: gloo (")
    table = str(report)
    assert table.splitlines()[0].split() == ["check", "case", "result", "found", "seconds"]
    assert "1 passed, 0 failed, 1 skipped in" in table
    assert "\x1b" not in table
    assert json.loads(done.stdout)["device"] == "cpu"


def test_an_unknown_check_is_refused_with_those_there_are() -> None:
    done = in_process.plan("selftest", "--skip", "everything", cwd=Path.cwd())
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: --skip everything is no check\nhint: the checks are environment, links, "
    )
