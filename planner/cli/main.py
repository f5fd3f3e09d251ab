"""Run `plan`: find the verb, run it, and turn every failure into a sentence and an exit code.

Only light modules are imported here and by the verbs' `add_parser`, so that help shows at once.
"""

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from planner.cli import profile, solve, train, views
from planner.cli.elsewhere import meaning_here
from planner.cli.output import as_flags, print_complaint, try_outputs
from planner.cli.parser import Advanced, Parser, grouped_verbs
from planner.cli.results import answered, begin_command, results_apart
from planner.errors import InputError, PlannerError, did_you_mean
from planner.schedule.own_file import load_schedules
from planner.streams import prepare_streams
from planner.terminal import PrintableFormatter, printable

VERBS: tuple[Callable[[Any], None], ...] = (
    profile.add_parser,
    solve.add_parser,
    views.add_show,
    views.add_questions,
    views.add_simulate,
    views.add_report,
    train.add_train,
    train.add_export,
    train.add_tours,
)

DESCRIPTION = """\
Automatic pipeline-parallel training in PyTorch: measure a model, find its fastest split into stages
and replicas over your GPUs, and train it that way.

    plan profile model.py            measure each layer of the model on this device -> profile.json
    plan solve --servers 2 --gpus-per-server 4 --bandwidth pcie4,10Gbps
                                     find the fastest plan for two servers of 4 GPUs -> plan.json
    plan report                      the plan's stages, timeline and memory         -> report.html
    plan train model.py              train the model by the plan

New here? `plan quickstart` does all of it with a small model.
"""
EPILOG = """\
`plan VERB --help` shows the options of a first week, `plan VERB --help-all` all of them.
exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 no plan fits, 130 interrupted
"""
INTERRUPTED = 130
# The verbs by what they are for, as `plan --help` lists them.
GROUPS = {
    "plan": ("fit", "solve", "price"),
    "look": ("show", "compare", "explain", "simulate", "report"),
    "run": ("profile", "train", "export", "quickstart", "selftest"),
}
# The verbs that make a plan, or read one.
UNDER_A_SCHEDULE = (*GROUPS["plan"], *GROUPS["look"], "train", "export")


class _Version(argparse.Action):
    """Print versions and devices, for which torch is imported, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from planner.profiler.this_machine import describe_machine

        print(printable(describe_machine()))
        parser.exit()


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="plan", epilog=EPILOG)
    help = "show the versions of plan, Python and torch, and the devices here"
    parser.add_argument("--version", action=_Version, nargs=0, help=help)
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for add_verb in VERBS:
        add_verb(subparsers)
    parser.description = f"{DESCRIPTION}\n{grouped_verbs(subparsers, GROUPS)}"

    for each in subparsers.choices.values():
        if "--json" not in each._option_string_actions:
            each.add_argument(
                "--json", action="store_true", help="print the answer as JSON, with names of files"
            )

    for name in UNDER_A_SCHEDULE:
        help = Advanced("a Python file that registers a schedule of your own; may be repeated")
        subparsers.choices[name].add_argument(
            "--schedule-from", action="append", metavar="FILE", help=help
        )

    for each in subparsers.choices.values():
        each.add_help_all()
    # On each verb, so that it stands where people add it: at the end.
    for each in (parser, *subparsers.choices.values()):
        help = "say more, such as the solver and its bound; -vv: tracebacks, too"
        each.add_argument(
            "-v", action="count", dest="verbosity", default=argparse.SUPPRESS, help=help
        )

    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, with the process's arguments or those given, and return its exit code."""
    prepare_streams()
    begin_command()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    # who reads stdout has left, as in `plan show | head`; the interpreter flushes at exit
    except BrokenPipeError:
        _leave_stdout()
        return 1


def _run(arguments: list[str]) -> int:
    if logging.lastResort is not None:
        # warnings of the library in this process
        logging.lastResort.setFormatter(PrintableFormatter())

    verbose, as_json = False, "--json" in arguments  # also where they cannot be parsed
    try:
        _load_schedules(arguments)
        parser = build_parser()
        if "_ARGCOMPLETE" in os.environ:  # the shell asks what could follow
            import argcomplete

            argcomplete.autocomplete(parser)
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise _unknown(parser, args.verb, unknown)
        verbose = getattr(args, "verbosity", 0) >= 2
        try_outputs(args)
        with results_apart():
            return int(args.function(args))
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        failure = _failure(error)
        code = INTERRUPTED
        if not isinstance(error, KeyboardInterrupt):
            code = failure.exit_code
        # The answer of workers is that of all, after restarts. What fails after the answer adds
        # none to it.
        told = as_json and "RANK" not in os.environ and not answered()
        # what was printed before the failure comes before the message
        _finish_stdout(failure, code, as_json=told)
        if verbose:
            sys.stderr.write(printable(traceback.format_exc()))
        print_complaint("error", failure.message, failure.hint)
        return code


def _load_schedules(arguments: Sequence[str]) -> None:
    """Import the files of users' schedules, whose names the flags of the verbs then take."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--schedule-from", action="append", default=[])
    try:
        given, _ = early.parse_known_args(arguments)
    except argparse.ArgumentError:  # which the whole parser tells with the verb's usage
        return
    for path in given.schedule_from:
        load_schedules(path)


def _finish_stdout(failure: PlannerError, code: int, *, as_json: bool) -> None:
    """Write all that is to be on stdout, with the failure as JSON; nothing where stdout takes no
    more.

    The failure is told on stderr then, and may be that of stdout itself: its disk is full.
    """
    try:
        if as_json:
            told = {
                "error": as_flags(failure.message),
                "hint": as_flags(failure.hint),
                "exit_code": code,
            }
            print(json.dumps(told, indent=1))
        sys.stdout.flush()
    except OSError:
        _leave_stdout()


def _leave_stdout() -> None:
    """Let stdout lead nowhere: the interpreter flushes it at exit, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unknown(parser: Parser, verb: str, unknown: Sequence[str]) -> InputError:
    """Return the error about arguments that a verb does not know, with what may have been meant."""
    verbs = next(iter(parser._subparsers._group_actions)).choices  # type: ignore[union-attr]
    options = {name: list(each._option_string_actions) for name, each in dict(verbs or {}).items()}

    flag = unknown[0].partition("=")[0]
    hint = meaning_here(flag)
    if flag.startswith("--") and not hint:
        hint = did_you_mean(flag[2:], options[verb])
    others = [f"`plan {name}`" for name, flags in options.items() if flag in flags]
    if others:
        hint += f"{flag} is an option of {', '.join(others)}; "

    return InputError(
        f"`plan {verb}` does not know {' '.join(unknown)}",
        hint=f"{hint}see: plan {verb} --help",
    )


def _out_of_range(error: ValueError) -> PlannerError | None:
    from planner.formats.files import out_of_range  # not at the top: it imports pydantic

    return out_of_range(error)


def _failure(error: BaseException) -> PlannerError:
    match error:
        case PlannerError():
            return error
        case KeyboardInterrupt():
            return PlannerError("interrupted")
        case OSError():
            return PlannerError(f"the system refused: {error}", hint="-vv shows where")
        case RuntimeError() if str(error) == "can't start new thread":
            return PlannerError(
                "the system refused: no more threads can be started",
                hint="raise the limit of processes and threads, which `ulimit -u` shows, or end "
                "other programs",
            )
        case ValueError() if (sentence := _out_of_range(error)) is not None:
            return sentence
        case _:
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            return PlannerError(f"unexpected {what}", hint="this is a bug in plan; -vv shows where")


if __name__ == "__main__":
    sys.exit(main())
