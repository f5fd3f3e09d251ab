"""The parser of `plan`: verbs in groups, and a help that shows the options of a first week unless
asked for all.

`--help` leaves out options whose help is `Advanced`, and other names of an option. `--help-all`
shows both.
"""

import argparse
import copy
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from planner.cli.output import ALIASES
from planner.errors import InputError, did_you_mean

# so that "-1Gbps" is a value, and its option says what is wrong with it
_NEGATIVE = re.compile(r"-\d")
HELP_ALL = "--help-all"


class Advanced(str):
    """The help of an option that `--help-all` alone shows."""

    __slots__ = ()


class FullHelp(argparse.RawDescriptionHelpFormatter):
    """Help with all options and all their names; lines of an option's help stay lines."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        if "\n" not in text:
            return super()._split_lines(text, width)
        hanging = textwrap.TextWrapper(width, subsequent_indent="  ", break_on_hyphens=False)
        return [part for line in text.splitlines() for part in hanging.wrap(line)]

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option; verbs are listed by the description, in groups."""
        if not isinstance(action, argparse._SubParsersAction):
            super().add_argument(action)


class ShortHelp(FullHelp):
    """Help without advanced options and without aliases."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """Add the line "usage: ..." of the options that are shown."""
        shown = [action for action in actions if not is_advanced(action)]
        super().add_usage(usage, shown, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option, unless it is advanced."""
        if not is_advanced(action):
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if name not in ALIASES]
        return super()._format_action_invocation(shown)


def is_advanced(action: argparse.Action) -> bool:
    """Return whether the short help leaves an option out."""
    return isinstance(action.help, Advanced)


class _HelpAll(argparse.Action):
    """Print the help with all options, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.formatter_class = FullHelp
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like all others, and name what could have been meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=ShortHelp, allow_abbrev=False)
        self._negative_number_matcher = _NEGATIVE

    def add_help_all(self) -> None:
        """Declare `--help-all`, and let the short help end with its name."""
        self.add_argument(HELP_ALL, action=_HelpAll, nargs=0, help="show all options")

    def format_help(self) -> str:
        """Return the help, with what it leaves out."""
        hidden = sum(is_advanced(action) for action in self._actions)
        if self.formatter_class is FullHelp or HELP_ALL not in self._option_string_actions:
            return super().format_help()
        return f"{super().format_help()}\n{_rest(hidden)}: {self.prog} {HELP_ALL}\n"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = did_you_mean(str(value), map(str, action.choices or ()))
            raise InputError(str(error), hint=f"{meant}see: {self.prog} --help") from None

    def error(self, message: str) -> NoReturn:
        """Raise InputError with what argparse found wrong."""
        raise InputError(message, hint=f"see: {self.prog} --help")


def _rest(hidden: int) -> str:
    if hidden == 0:
        return "other names of these options"
    return f"{hidden} more option{'s' * (hidden > 1)}, and other names of these"


def grouped_verbs(
    verbs: "argparse._SubParsersAction[Any]",
    groups: Mapping[str, Sequence[str]],
) -> str:
    """List the verbs by group, each with its summary."""
    summaries = {action.dest: action.help for action in verbs._choices_actions}
    widest = max(map(len, summaries))
    lines = []
    for title, names in groups.items():
        lines.append(f"{title}:")
        lines += [f"  {name:{widest}}  {summaries[name]}" for name in names]
        lines.append("")
    return "\n".join(lines)
