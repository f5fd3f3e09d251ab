"""Streams that are closed, full, or of a few characters: an answer that is right, or a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.formats.profile import save_profile
from tests.cli.in_process import plan
from tests.samples import layer, profile

TIMEOUT_S = 100
NAME = "модель \N{GRINNING FACE}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A profile of a model with a name beyond ASCII."""
    measured = profile(layer("first", 1.0, 2.0), layer("second", 1.0, 2.0))
    save_profile(measured.model_copy(update={"model": NAME}), tmp_path / "profile.json")
    return tmp_path


def run(folder: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell, in which $PLAN is the command."""
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "PLAN": f"{sys.executable} -m planner", **variables}
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("solve --gpus 2 --bandwidth 1Gbps --json", 0), ("show none.json", 2), ("--help", 0)],
    ids=["answer", "error", "help"],
)
def test_a_closed_stream_leads_nowhere(folder: Path, closed: str, arguments: str, code: int) -> None:
    done = run(folder, f"$PLAN {arguments} {closed}")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if arguments.startswith("solve"):
        assert json.loads((folder / "plan.json").read_text("utf-8"))["model"] == NAME, "and no other text"


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_characters_that_a_stream_lacks_are_escaped(folder: Path, variables: dict[str, str]) -> None:
    shown = run(folder, "$PLAN show profile.json", PYTHONCOERCECLOCALE="0", **variables)
    assert shown.returncode == 0, shown.stderr
    assert NAME.encode("ascii", "backslashreplace").decode() in shown.stdout

    answer = run(folder, "$PLAN show profile.json --json", PYTHONCOERCECLOCALE="0", **variables)
    assert answer.stdout.isascii()
    assert json.loads(answer.stdout)["model"] == NAME


def test_an_answer_that_finds_no_room_is_an_error(folder: Path) -> None:
    done = run(folder, "$PLAN solve --gpus 2 --bandwidth 1Gbps > /dev/full")
    assert done.returncode == 1
    assert "error: the system refused: [Errno 28] No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "plan.json").exists()


def test_no_thread_can_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    done = plan("solve", "--gpus", "2", "--bandwidth", "1Gbps", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the system refused: no more threads can be started\nhint: ")
