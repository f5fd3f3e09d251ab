"""Arguments in messages of the library appear as flags at the command line."""

import argparse
from collections.abc import Iterable

import pytest

from planner.cli.main import build_parser, main
from planner.cli.output import ALIASES, FLAGS, NEGATIONS, as_flags
from planner.errors import InputError, PlannerError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`steps=0` trains nothing", "--steps 0 trains nothing"),
        ("give `steps` 1 or more", "give --steps 1 or more"),
        ("make a plan with `schedule=zb-h1`", "make a plan with --schedule zb-h1"),
        ("`hang_timeout_s` allows for more", "--hang-timeout allows for more"),
        ("record one with `trace=FILE`", "record one with --trace FILE"),
        ("leave `scale_lr` or `scale_lr=True` out", "leave --scale-lr or --scale-lr out"),
        ("`overlap=False` and `shared=False`", "--no-overlap and --own-links"),
        ("`memory_bytes=26MB`, `memory_bytes=26000000`", "--memory 26MB, --memory 26000000B"),
        ("`latency_s=1e-5`", "--latency 1e-5s"),
        ("add `dataset()` to `model.py`, `plan solve` and `in_flight`", None),
        ("a `b", None),
    ],
)
def test_arguments_become_flags_and_other_text_stays(text: str, shown: str | None) -> None:
    assert as_flags(text) == (text if shown is None else shown)


def _verbs(parser: argparse.ArgumentParser) -> Iterable[argparse.ArgumentParser]:
    return next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ).choices.values()


def test_the_names_are_those_of_all_flags() -> None:
    actions = [action for verb in _verbs(build_parser()) for action in verb._actions]
    given = {
        option for action in actions for option in action.option_strings if option.startswith("--")
    }
    own = {"--help", "--help-all"}
    assert {flag for flag, _ in FLAGS.values()} | set(NEGATIONS.values()) == given - own - ALIASES
    named = {action.dest for action in actions if action.option_strings}
    assert named - {"help", "help_all", "verbosity"} <= FLAGS.keys()
    assert given >= ALIASES


def test_a_hint_is_part_of_the_text() -> None:
    assert str(InputError("`steps=0` trains nothing", hint="give `steps` 1 or more")) == (
        "`steps=0` trains nothing\nhint: give `steps` 1 or more"
    )
    assert str(PlannerError("it failed")) == "it failed"


def test_the_command_shows_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(args: object) -> int:
        raise InputError("`steps=0` trains nothing", hint="give `steps` 1 or more")

    monkeypatch.setattr("planner.cli.views.simulate", fails)
    assert main(["simulate"]) == 2
    assert (
        capsys.readouterr().err == "error: --steps 0 trains nothing\nhint: give --steps 1 or more\n"
    )
