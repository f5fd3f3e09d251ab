"""`--help` shows the options of a first week, `--help-all` all of them; names of other programs are
understood.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.cli.elsewhere import ELSEWHERE
from planner.cli.main import GROUPS, build_parser, main
from planner.cli.output import ALIASES
from planner.cli.parser import is_advanced
from planner.formats.profile import save_profile
from tests.cli.in_process import plan
from tests.samples import layer, profile

MOST_FLAGS = 45  # that the help of all verbs shows, unless asked for all
MODEL = profile(layer("a", 0.2, 0.4, output_bytes=1000), layer("b", 0.1, 0.2, weight_bytes=10**8))
CLUSTER = ("--gpus", "2", "--bandwidth", "1Gbps")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_profile(MODEL, tmp_path / "profile.json")
    return tmp_path


def verbs() -> dict[str, argparse.ArgumentParser]:
    parser = build_parser()
    return dict(
        next(
            each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
        ).choices
    )


def actions() -> Iterator[tuple[str, argparse.Action]]:
    """Yield the options of all verbs, each with the verb's name."""
    for name, verb in verbs().items():
        for action in verb._actions:
            if action.option_strings:
                yield name, action


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def declared(help: str) -> set[str]:
    """Return the flags that a help declares, each at the beginning of a line."""
    lines = re.findall(r"^  (-.*?)(?:  |$)", help, re.MULTILINE)
    return {flag for line in lines for flag in re.findall(r"--[a-z][\w-]*", line)}


def test_few_flags_are_shown_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    flags = declared(shown(["--help"], capsys))
    for verb in verbs():
        flags |= declared(shown([verb, "--help"], capsys))
    assert len(flags) <= MOST_FLAGS, sorted(flags)
    assert flags.isdisjoint(ALIASES)


@pytest.mark.parametrize("verb", verbs())
def test_the_rest_is_shown_on_demand(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    usual = shown([verb, "--help"], capsys)
    assert usual.endswith(f": plan {verb} --help-all\n")

    everything = declared(shown([verb, "--help-all"], capsys))
    options = [action for name, action in actions() if name == verb]
    assert everything == {
        name for each in options for name in each.option_strings if name.startswith("--")
    }
    hidden = {name for each in options if is_advanced(each) for name in each.option_strings}
    assert declared(usual).isdisjoint(hidden)
    assert all(name not in usual.partition("\n\n")[0] for name in hidden), "in the usage"


def test_what_must_be_given_is_shown() -> None:
    assert [action.dest for _, action in actions() if action.required and is_advanced(action)] == []


def test_every_verb_is_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(verb for group in GROUPS.values() for verb in group) == sorted(verbs())
    listed = re.findall(r"^  ([a-z]+)  ", shown(["--help"], capsys), re.MULTILINE)
    assert listed[0] == "fit"
    assert set(listed) == set(verbs())


@pytest.mark.parametrize(
    ("alias", "own"),
    [
        (("--nnodes", "2", "--nproc-per-node", "2"), ("--servers", "2", "--gpus-per-server", "2")),
        (
            (
                "--gpus",
                "4",
                "--servers",
                "2",
                "--schedule",
                "1f1b-flush",
                "--global-batch-size",
                "32",
            ),
            ("--gpus", "4", "--servers", "2", "--schedule", "1f1b-flush", "--minibatch", "32"),
        ),
        (
            ("--gpus", "4", "--servers", "2", "--schedule", "pipedream"),
            ("--gpus", "4", "--servers", "2", "--schedule", "1f1b"),
        ),
    ],
    ids=["servers", "global batch", "schedule"],
)
def test_names_of_other_programs_mean_the_same(
    folder: Path,
    alias: tuple[str, ...],
    own: tuple[str, ...],
) -> None:
    answers = []
    for arguments in (alias, own):
        solved = plan("solve", *arguments, "--bandwidth", "10GB/s,1Gbps", "--json", cwd=folder)
        assert solved.returncode == 0, solved.stderr
        answer = json.loads(solved.stdout)
        answer["solver"].pop("seconds")
        answers.append(answer)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("verb", "alias", "dest"),
    [
        ("profile", ("--micro-batch-size", "4"), "batch_size"),
        ("fit", ("--micro-batch-size", "4"), "batch_size"),
        ("fit", ("--global-batch-size", "4"), "minibatch"),
        ("profile", ("--tensor-parallel-size", "4"), "tensor"),
        ("solve", ("--tensor-parallel-size", "4"), "tensor"),
        ("fit", ("--tensor-parallel-size", "4"), "tensor"),
        ("train", ("--rdzv-endpoint", "host:1"), "rendezvous"),
        ("train", ("--max-steps", "4"), "steps"),
        ("quickstart", ("--max-steps", "4"), "steps"),
    ],
)
def test_aliases_set_the_option(verb: str, alias: tuple[str, str], dest: str) -> None:
    model = ["model.py"] if verb in ("profile", "fit", "train") else []
    value = getattr(build_parser().parse_args([verb, *model, *alias]), dest)
    assert str(value).strip("(,)") == alias[1]


@pytest.mark.parametrize("flag", ELSEWHERE)
def test_what_means_something_else_is_refused_with_what_to_give(folder: Path, flag: str) -> None:
    for spelling in (flag, "--" + flag[2:].replace("-", "_")):
        refused = plan("solve", *CLUSTER, spelling, "4", cwd=folder)
        assert refused.returncode == 2
        assert f"does not know {spelling} 4" in refused.stderr
        assert re.search(r"hint: .*--[a-z-]+.* `plan (solve|price|profile)`", refused.stderr)
        assert "`microbatches`" not in refused.stderr
