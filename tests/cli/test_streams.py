"""Streams that are closed, full, or of a few characters: an answer that is right, or a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.formats.plan import save_plan
from planner.formats.profile import save_profile
from tests.cli.in_process import plan
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.samples import layer, profile

TIMEOUT_S = 150
NAME = "модель \N{GRINNING FACE}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A profile of a model with a name beyond ASCII."""
    measured = profile(layer("first", 1.0, 2.0), layer("second", 1.0, 2.0))
    save_profile(measured.model_copy(update={"model": NAME}), tmp_path / "profile.json")
    return tmp_path


def run(folder: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell, in which $PLAN is the command."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path.cwd()),
        "PLAN": f"{sys.executable} -m planner",
        **variables,
    }
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


ANSWER = ("solve --gpus 2 --bandwidth 1Gbps --json", 0)


@pytest.mark.parametrize(
    ("arguments", "code", "closed"),
    [
        *((*ANSWER, closed) for closed in (">&-", "2>&-", "<&-", ">&- 2>&- <&-")),
        ("show none.json", 2, "2>&-"),
        ("show none.json", 2, ">&- 2>&- <&-"),
        ("--help", 0, ">&-"),
    ],
)
def test_a_closed_stream_leads_nowhere(
    folder: Path, arguments: str, code: int, closed: str
) -> None:
    done = run(folder, f"$PLAN {arguments} {closed}")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if arguments.startswith("solve"):
        assert json.loads((folder / "plan.json").read_text("utf-8"))["model"] == NAME, (
            "and no other text"
        )


# Says which streams a worker has, in a file: none may be a connection or a file of the run.
STREAMS = """
import os

def on_update(minibatch, loss, metrics):
    with open("streams", "w") as file:
        file.write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""
SCRIPT = "import planner; planner.train('model.py', planner.load_plan('plan.json'), steps=2)"


@pytest.mark.parametrize("closed", [pytest.param("2>&-", marks=pytest.mark.slow), "<&- 2>&-"])
def test_what_a_model_file_starts_prints_nothing_amid_an_answer(
    tmp_path: Path, closed: str
) -> None:
    prints = "import os\nos.system('echo printed')\n"
    write_model(tmp_path, "convolutional", "sgd", more=prints).rename(tmp_path / "model.py")
    done = run(tmp_path, f"$PLAN profile model.py --estimate --batch-size 4 --json {closed}")
    assert done.returncode == 0
    assert json.loads(done.stdout)["layers"]


@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize(
    "command", ["$PLAN train model.py --steps 2", f'{sys.executable} -c "{SCRIPT}"']
)
def test_workers_of_a_process_with_closed_streams_train(tmp_path: Path, command: str) -> None:
    path = write_model(tmp_path, "convolutional", "sgd", more=STREAMS).rename(tmp_path / "model.py")
    save_plan(make_plan(structural_profile(path, 4), (1, 1)), tmp_path / "plan.json")
    done = run(tmp_path, f"{command} <&- >&- 2>told", OMP_NUM_THREADS="1")
    assert done.returncode == 0, (tmp_path / "told").read_text("utf-8")

    stdin, stdout, stderr = (tmp_path / "streams").read_text("utf-8").split()
    assert (stdin, stderr) == (os.devnull, str(tmp_path / "told"))
    assert stdout in (os.devnull, stderr), "while `plan` runs, stdout leads to stderr"


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}]
)
def test_characters_that_a_stream_lacks_are_escaped(
    folder: Path, variables: dict[str, str]
) -> None:
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


@pytest.mark.parametrize(
    "arguments", ["show profile.json --json", "show none.json --json"], ids=["answer", "error"]
)
def test_a_failure_is_told_where_stdout_takes_no_json(folder: Path, arguments: str) -> None:
    code = 2 if "none" in arguments else 1
    full = run(folder, f"$PLAN {arguments} > /dev/full")
    assert full.returncode == code
    assert full.stderr.startswith("error: ")
    assert "Traceback" not in full.stderr


def test_a_failure_is_told_where_nobody_reads_its_json(folder: Path) -> None:
    left = run(folder, "{ $PLAN show none.json --json; echo $? > code; } | true")
    assert (folder / "code").read_text("utf-8") == "2\n"
    assert left.stderr.startswith("error: there is no file 'none.json'\n")


def test_a_failure_after_another_command_is_json(folder: Path) -> None:
    answer = plan("show", "profile.json", "--json", cwd=folder)
    assert json.loads(answer.stdout)["model"] == NAME
    failure = plan("solve", "--gpus", "few", "--json", cwd=folder)
    assert json.loads(failure.stdout)["exit_code"] == failure.returncode == 2


def test_no_thread_can_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    done = plan("solve", "--gpus", "2", "--bandwidth", "1Gbps", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: the system refused: no more threads can be started\nhint: "
    )
