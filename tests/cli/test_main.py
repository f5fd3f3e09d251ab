"""The command line from outside: files, exit codes, streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner import __version__
from planner.cli import main as cli
from planner.formats.plan import load_plan
from planner.formats.profile import save_profile
from tests.cli.in_process import plan
from tests.samples import layer, profile

MODEL = profile(
    layer("a", 0.2, 0.4, output_bytes=1000, saved_bytes=10**9),
    layer("b", 0.1, 0.2, weight_bytes=10**8, saved_bytes=10**9),
)
SOLVE = ("solve", "--gpus", "3", "--bandwidth", "1Gbps")


def own_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "planner", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_profile(MODEL, tmp_path / "profile.json")
    return tmp_path


def test_defaults_chain_solve_and_show(folder: Path) -> None:
    solved = own_process(*SOLVE, cwd=folder)
    assert solved.returncode == 0, solved.stderr
    assert "2-1 on 3 GPUs" in solved.stdout
    assert "written to plan.json" in solved.stderr
    shown = plan("show", cwd=folder)
    assert shown.stdout == solved.stdout
    assert shown.stderr == ""


def test_json_is_all_there_is_on_stdout(folder: Path) -> None:
    solved = json.loads(plan(*SOLVE, "--json", cwd=folder).stdout)
    assert solved["config"] == "2-1"
    assert json.loads((folder / "plan.json").read_text()) == solved
    assert json.loads(plan("show", "--json", cwd=folder).stdout) == solved
    assert (
        json.loads(plan("show", "profile.json", "--json", cwd=folder).stdout)["layers"][0]["name"]
        == "a"
    )


def test_schedules(folder: Path) -> None:
    gpipe = json.loads(plan(*SOLVE, "--json", "--schedule", "gpipe", cwd=folder).stdout)
    assert (gpipe["schedule"], gpipe["microbatches"]) == ("gpipe", 12)
    one = json.loads(
        plan(*SOLVE, "--json", "--schedule", "gpipe", "--microbatches", "1", cwd=folder).stdout
    )
    assert one["config"] == "1"
    every = plan(*SOLVE, "--schedule", "auto", cwd=folder)
    rows = [
        line
        for line in every.stdout.splitlines()
        if line.startswith(("1f1b ", "2bw ", "1f1b-flush ", "gpipe "))
    ]
    assert len(rows) == 4
    assert not load_plan(folder / "plan.json").schedule.asynchronous


def with_change(old: str, new: str) -> str:
    text = MODEL.model_dump_json()
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("arguments", "content", "code", "complaint"),
    [
        (SOLVE, None, 2, "there is no file 'profile.json'"),
        ((*SOLVE, "--profile", "."), None, 2, "cannot be read"),
        (
            SOLVE,
            with_change('"forward_s":0.2', '"forward_s":-0.2'),
            2,
            "layers[0].forward_s = -0.2",
        ),
        (SOLVE, with_change('"forward_s":0.2', '"forward_s":NaN'), 2, "layers[0].forward_s = nan"),
        (SOLVE, with_change('"op":', '"colour":1,"op":'), 2, "layers[0].colour = 1: unknown field"),
        (SOLVE, with_change('"schema_version":1', '"schema_version":2'), 2, "schema_version 2"),
        (SOLVE, "{", 2, "is not JSON"),
        (("solve", "--gpus", "8", "--bandwidth", "10Gb"), "", 2, "bandwidth '10Gb' is not a rate"),
        (
            ("solve", "--topology", "4x", "--bandwidth", "1Gbps"),
            "",
            2,
            "'4x' lacks a value before or after 'x'",
        ),
        (
            ("solve", "--gpus", "8", "--bandwidth", "-1Gbps"),
            "",
            2,
            "bandwidth '-1Gbps' is not a positive, finite quantity",
        ),
        (
            ("solve", "--gpus", "0", "--bandwidth", "1Gbps"),
            MODEL.model_dump_json(),
            2,
            "a cluster of 0 GPUs",
        ),
        (
            ("solve", "--gpus", "-3", "--bandwidth", "1Gbps"),
            MODEL.model_dump_json(),
            2,
            "a cluster of -3 GPUs",
        ),
        (("solve", "--gpus", "two", "--bandwidth", "1Gbps"), "", 2, "invalid int value: 'two'"),
        (("solve", "--gpus", "8"), MODEL.model_dump_json(), 2, "the cluster has no bandwidth"),
        ((*SOLVE, "--memory", "16"), "", 2, "size '16' is not a number of bytes"),
        ((*SOLVE, "--latency", "50"), "", 2, "time '50' has no unit"),
        ((*SOLVE, "--memory", "1GB"), MODEL.model_dump_json(), 3, "no plan fits 3 GPUs of 1 GB"),
        ((*SOLVE, "-o", "profile.json/plan.json"), MODEL.model_dump_json(), 1, "cannot be written"),
        (
            ("simulate", "--trace", "profile.json/trace.json"),
            MODEL.model_dump_json(),
            1,
            "cannot be written",
        ),
        (
            (*SOLVE, "--microbatches", "4"),
            MODEL.model_dump_json(),
            2,
            "--microbatches 4 does not apply",
        ),
        (("show",), "", 2, "there is no file 'plan.json'"),
        (
            ("show", "profile.json"),
            '{"schema_version": 2, "stages": []}',
            2,
            "schema_version 2, this version reads 1",
        ),
        (("frobnicate",), "", 2, "invalid choice: 'frobnicate'"),
        (("solve", "more"), "", 2, "`plan solve` does not know more"),
        ((), "", 2, "required: VERB"),
    ],
)
def test_wrong_input_is_one_sentence_a_hint_and_a_code(
    tmp_path: Path, arguments: tuple[str, ...], content: str | None, code: int, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "profile.json").write_text(content)
    done = plan(*arguments, cwd=tmp_path)
    assert done.returncode == code
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert complaint in error
    assert hint.startswith("hint: ")
    assert done.stdout == ""
    assert not (tmp_path / "plan.json").exists()


def test_an_unknown_option_names_those_that_could_be_meant(tmp_path: Path) -> None:
    done = plan("solve", "--stages", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: `plan solve` does not know --stages 2",
        "hint: did you mean --max-stages? --stages is an option of `plan price`; see: plan solve "
        "--help",
    ]


def test_an_option_that_another_one_begins_with_is_not_taken_for_it(tmp_path: Path) -> None:
    done = plan("solve", "--gpu", "a100", "--gpus", "4", "--bandwidth", "1Gbps", cwd=tmp_path)
    assert done.returncode == 2
    first, hint = done.stderr.splitlines()
    assert first == "error: `plan solve` does not know --gpu a100"
    assert "did you mean --gpus" in hint


def test_a_traceback_is_shown_only_on_demand(tmp_path: Path) -> None:
    assert "Traceback" in plan("show", "none.json", "-vv", cwd=tmp_path).stderr
    assert "Traceback" not in plan("show", "none.json", "-v", cwd=tmp_path).stderr


def test_version_and_help(tmp_path: Path) -> None:
    assert own_process("--version", cwd=tmp_path).stdout.startswith(
        f"planner {__version__}, Python 3."
    )
    shown = own_process("solve", "--help", cwd=tmp_path)
    assert shown.returncode == 0
    assert "--bandwidth RATE" in shown.stdout


def test_the_shell_completes_verbs_and_options(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        found = tmp_path / "found"
        asked = {
            "_ARGCOMPLETE": "1",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "_ARGCOMPLETE_IFS": "\n",
        }
        process = subprocess.run(
            [sys.executable, "-m", "planner"],
            env={**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(found)},
            timeout=60,
            check=False,
        )
        assert process.returncode == 0
        return found.read_text(encoding="utf-8").split()

    assert completed("plan so") == ["solve"]
    assert "--bandwidth" in completed("plan solve --b")
    assert "zb-h1" in completed("plan solve --schedule z")


def test_a_reader_that_leaves_is_no_mistake(folder: Path) -> None:
    many = profile(*(layer(f"layer{i}") for i in range(200)), edges=[])
    save_profile(many, folder / "many.json")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "planner", "show", "many.json"],
        cwd=folder,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (
            ZeroDivisionError("x"),
            1,
            "error: unexpected ZeroDivisionError: x\nhint: this is a bug in plan",
        ),
        (
            OSError(28, "No space left on device"),
            1,
            "error: the system refused: [Errno 28] No space left on device",
        ),
    ],
)
def test_other_failures(
    failure: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> int:
        raise failure

    monkeypatch.setattr("planner.cli.views.show", fail)
    assert cli.main(["show"]) == code
    assert capsys.readouterr().err.startswith(said)


def test_help_and_solve_do_not_import_what_is_slow(folder: Path) -> None:
    check = (
        "import sys; from planner.cli.main import main; code = main({}); print(*sys.modules, "
        "file=sys.stderr)"
    )
    for arguments, absent in [
        (["show", "none"], {"torch"}),
        ([*SOLVE], {"torch", "networkx", "pulp"}),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", check.format(arguments)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert absent.isdisjoint(done.stderr.split())
    built = (
        "import sys; from planner.cli.main import build_parser; build_parser(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", built], cwd=folder, capture_output=True, text=True, check=True
    )
    assert {"torch", "numpy", "pydantic"}.isdisjoint(done.stdout.split())


def test_failures_are_json_for_machines(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(MODEL.model_dump_json())
    done = plan(*SOLVE, "--memory", "1GB", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == 3
    assert told["error"].startswith("no plan fits 3 GPUs of 1 GB")
    assert "--memory" in told["hint"]
    wrong = plan("solve", "--gpus", "two", "--json", cwd=tmp_path)
    assert json.loads(wrong.stdout)["exit_code"] == wrong.returncode == 2


def test_files_that_are_answers_are_named_in_json(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(MODEL.model_dump_json())
    assert plan(*SOLVE, cwd=tmp_path).returncode == 0
    done = plan("report", "--json", "-o", "about.html", cwd=tmp_path)
    assert json.loads(done.stdout) == {"written": "about.html"}
    assert (tmp_path / "about.html").exists()
