"""Every command of the documentation is one that `plan` takes, and runs where one machine is
enough.

The default tests run what needs no training, on files made beforehand. Those marked slow type all
commands of a page into a shell, one after the other, in a folder with a small model file, and the
page's Python scripts where they stand. What neither runs says why in the page; `plan fit` by a
model's name is left out of the slow ones where the package transformers is not installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from docs.package_page import PAGE
from planner.cli.main import build_parser
from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import save_plan
from planner.formats.profile import Profile, save_profile
from planner.solver import search_plan as solve
from tests.cli.in_process import plan
from tests.docs.commands import Command, commands
from tests.samples import layer, profile

ROOT = Path(__file__).resolve().parents[2]
# The package's page is README.md once more.
PAGES = (ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {PAGE}))
FOUND = [command for page in PAGES for command in commands(page)]
# Commands of these verbs measure or train; the rest is quick.
RUNS = {"run.json", "trace.json"}  # of training
SLOW_VERBS = ("profile", "train", "quickstart", "selftest", "fit")
SEARCHES = ("solve", "compare", "explain", "report")  # that take a limit of time
_INLINE = re.compile(r"`plan ([a-z][a-z-]*)((?: [^`]*)?)`")


def _name(command: Command) -> str:
    return f"{command.page.relative_to(ROOT)}:{command.line}"


def _planner_words(command: Command) -> list[str] | None:
    """What `plan` gets, directly or as torchrun's module."""
    words = command.words
    if words[0] == "plan":
        return words[1:]
    return words[words.index("planner") + 1 :] if "planner" in words else None


@pytest.mark.parametrize("command", FOUND, ids=_name)
def test_plan_takes_the_command(command: Command) -> None:
    words = _planner_words(command)
    if words is not None and "--schedule-from" in words:
        pytest.skip("a test of the example registers its schedule")
    if words is not None:
        build_parser().parse_args(words)  # raises, with what is wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_verbs_and_options_named_in_the_text_exist(page: Path) -> None:
    verbs = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for verb, rest in _INLINE.findall(page.read_text(encoding="utf-8").replace("\n", " ")):
        assert verb in verbs, f"plan {verb}"  # type: ignore[operator]
        known = verbs[verb]._option_string_actions  # type: ignore[index]
        assert [
            option for option in re.findall(r"--[a-z][\w-]*", rest) if option not in known
        ] == [], f"plan {verb}"


@pytest.fixture(scope="module")
def model() -> Profile:
    return profile(
        *(
            layer(
                f"blocks.{i}", 0.1, 0.2, output_bytes=10**6, saved_bytes=10**7, weight_bytes=10**7
            )
            for i in range(8)
        )
    )


@pytest.fixture
def folder(tmp_path: Path, model: Profile) -> Path:
    """A folder with all the files that commands of pages leave for later ones."""
    cluster = flat_cluster(2, 1.25e8, 16 * 10**9)
    found = solve(model, cluster)
    names = (
        "profile",
        "v100",
        "profile-b8",
        "profile-b16",
        "profile-b32",
        "profile-a100",
        "profile-t4",
    )
    for name in names:
        size = int(name.partition("-b")[2] or 32)
        save_profile(model.model_copy(update={"microbatch_size": size}), tmp_path / f"{name}.json")
    for name in ("plan.json", "plan-8.json"):
        save_plan(found, tmp_path / name)
    (tmp_path / "cluster.json").write_text(cluster.model_dump_json(), encoding="utf-8")
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_needs_no_training_runs(page: Path, folder: Path) -> None:
    for command in commands(page):
        words = command.words
        if (
            words[0] == "plan"
            and words[1] not in SLOW_VERBS
            and not RUNS & set(words)
            and not command.not_run
        ):
            limit = ("--time-limit", "1s") if words[1] in SEARCHES else ()
            done = plan(*words[1:], *limit, cwd=folder)
            assert done.returncode == 0, f"{_name(command)}: {command.text}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_typed_into_a_shell(page: Path, tmp_path: Path) -> None:
    typed = [command for command in commands(page) if not command.not_run]
    if find_spec("transformers") is None:
        typed = [command for command in typed if not _names_a_model(command)]
    if not typed:
        pytest.skip("a page without commands")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (
        ("plan", "planner"),
        ("torchrun", "torch.distributed.run"),
        ("python", ""),
    ):
        script = programs / name
        script.write_text(
            f'#!/bin/sh\nexec {sys.executable} {f"-m {module}" if module else ""} "$@"\n'
        )
        script.chmod(0o755)
    run = tmp_path / "run"
    shutil.copytree(ROOT / "docs" / "scripts", run)
    shutil.copy(ROOT / "docs" / "examples" / "newest_muon.py", run)  # as a page says
    (run / "profiles").symlink_to(ROOT / "profiles")
    for place in (run, run / "quickstart"):
        place.mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("small_model.py"), place / "model.py")
    (run / "cluster.json").write_text(flat_cluster(2, 1.25e8).model_dump_json(), encoding="utf-8")
    before = (
        "plan profile model.py --batch-size 16 --seconds 1 && plan solve --gpus 2 --bandwidth 1Gbps"
    )
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [
            "bash",
            "-euxo",
            "pipefail",
            "-c",
            "\n".join([before, *(command.text for command in typed)]),
        ],
        cwd=run,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _names_a_model(command: Command) -> bool:
    """Return whether `plan fit` is asked about a model that the package transformers builds."""
    words = command.words
    return words[:2] == ["plan", "fit"] and not words[2].endswith(".py")


def test_a_command_that_plan_does_not_take_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Type\n\n    plan solve --gbus 4 \\\n        --bandwidth 1Gbps\n", encoding="utf-8"
    )
    (command,) = commands(page)
    assert (command.line, command.text) == (3, "plan solve --gbus 4 --bandwidth 1Gbps")
    with pytest.raises(InputError):
        test_plan_takes_the_command(command)


def test_python_scripts_are_found_whole(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "- Run\n\n        import a\n\n        if a:\n            a.b()\n\n    and.\n",
        encoding="utf-8",
    )
    (script,) = commands(page)
    assert (script.line, script.text) == (3, "python - <<'END'\nimport a\n\nif a:\n    a.b()\nEND")


def test_blocks_that_say_why_they_are_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: it takes two hosts -->\n\n    plan show\n\nText.\n\n    plan show\n",
        encoding="utf-8",
    )
    assert [command.not_run for command in commands(page)] == ["it takes two hosts", ""]
