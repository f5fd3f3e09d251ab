"""Run `plan`: find the verb, run it, and turn every failure into a sentence and an exit code.

Only light modules are imported here and by the verbs' `add_parser`, so that help shows at once.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from planner.cli import alternatives, fit, price, profile, solve, this_machine, train, views
from planner.cli.output import print_complaint, print_failure, try_outputs
from planner.errors import InputError, PlannerError, did_you_mean

# In the order in which help lists them.
VERBS: tuple[Callable[[Any], None], ...] = (
    profile.add_parser,
    solve.add_parser,
    fit.add_parser,
    price.add_parser,
    views.add_show,
    alternatives.add_parser,
    views.add_simulate,
    views.add_report,
    train.add_train,
    train.add_exports,
    this_machine.add_parser,
)

DESCRIPTION = """\
Automatic pipeline-parallel training in PyTorch: measure a model, find its fastest split into stages and replicas over
your GPUs, and train it that way.

    plan profile model.py                       model on this device  -> profile.json
    plan solve --gpus 8 --bandwidth 10Gbps      profile and cluster   -> plan.json
    plan simulate                               plan                  -> timeline, throughput, memory
    plan report                                 all of it             -> report.html
    plan train model.py                         plan                  -> trained model

New here? `plan quickstart` does all of it with a small model.
"""
EPILOG = """\
exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 no plan fits, 130 interrupted
"""
INTERRUPTED = 130
_NEGATIVE = re.compile(r"-\d")  # so that "-1Gbps" is a value, and its option says what is wrong with it


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like all others, and name what could have been meant."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = did_you_mean(str(value), map(str, action.choices or ()))
            raise InputError(str(error), hint=f"{meant}see: {self.prog} --help") from None

    def error(self, message: str) -> NoReturn:
        raise InputError(message, hint=f"see: {self.prog} --help")


class _Version(argparse.Action):
    """Print versions and devices, for which torch is imported, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from planner.profiler.this_machine import describe_machine

        print(describe_machine())
        parser.exit()


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="plan", description=DESCRIPTION, epilog=EPILOG, formatter_class=style, allow_abbrev=False)
    help = "show the versions of plan, Python and torch, and the devices here"
    parser.add_argument("--version", action=_Version, nargs=0, help=help)
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for add_verb in VERBS:
        add_verb(subparsers)
    for each in subparsers.choices.values():
        if "--json" not in each._option_string_actions:
            each.add_argument("--json", action="store_true", help="print the answer as JSON, files by their names")
    # On each verb, so that it stands where people add it: at the end.
    for each in (parser, *subparsers.choices.values()):
        each._negative_number_matcher = _NEGATIVE
        each.add_argument(
            "-v", action="count", dest="verbosity", default=argparse.SUPPRESS, help="-vv shows tracebacks"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code.

    Args:
        argv: arguments without the program's name; those of the process when None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose, as_json = False, "--json" in arguments  # also where they cannot be parsed
    try:
        parser = build_parser()
        if "_ARGCOMPLETE" in os.environ:  # the shell asks what could follow
            import argcomplete

            argcomplete.autocomplete(parser)
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise _unknown(parser, args.verb, unknown)
        verbose = getattr(args, "verbosity", 0) >= 2
        try_outputs(args)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return 1
        failure = _failure(error)
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else failure.exit_code
        try:
            if as_json and "RANK" not in os.environ:  # the answer of workers is that of all, after restarts
                print_failure(failure, code)
            sys.stdout.flush()  # results printed before the failure come before the message
        except BrokenPipeError:
            _reader_left()
        if verbose:
            traceback.print_exc()
        print_complaint("error", failure.message, failure.hint)
        return code


def _unknown(parser: Parser, verb: str, unknown: Sequence[str]) -> InputError:
    """Return the error for arguments that a verb does not take, with options that they could have meant."""
    verbs = next(iter(parser._subparsers._group_actions)).choices  # type: ignore[union-attr]
    options = {name: list(each._option_string_actions) for name, each in dict(verbs or {}).items()}
    given = unknown[0].partition("=")[0]
    others = [f"`plan {name}`" for name, names in options.items() if given in names]
    hint = did_you_mean(given[2:], options[verb]) if given.startswith("--") else ""
    hint += f"{given} is an option of {', '.join(others)}; " if others else ""
    return InputError(f"`plan {verb}` does not know {' '.join(unknown)}", hint=f"{hint}see: plan {verb} --help")


def _failure(error: BaseException) -> PlannerError:
    """Return the sentence and the hint for whatever was raised."""
    match error:
        case PlannerError():
            return error
        case KeyboardInterrupt():
            return PlannerError("interrupted")
        case OSError() if not isinstance(error, BrokenPipeError):
            return PlannerError(f"the system refused: {error}", hint="-vv shows where")
        case _:
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            return PlannerError(f"unexpected {what}", hint="this is a bug in plan; -vv shows where")


def _reader_left() -> bool:
    """Return whether stdout broke, as in `plan show | head`; if so, nothing more is written to it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    # The interpreter flushes once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


if __name__ == "__main__":
    sys.exit(main())
