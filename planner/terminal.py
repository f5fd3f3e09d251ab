"""What a terminal shows: a line that is rewritten in place, and names of others that must not
command it.
"""

import logging
import re
import sys

# Control characters but tab and line feed, and those that separate lines or let text run from right
# to left.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Replace characters that could command a terminal by their escapes in Python: "\\x1b" for the
    escape character.

    Names of models, layers and hosts and messages of other processes have them when somebody put
    them there.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def printable_json(text: str) -> str:
    """Replace the same characters in a JSON document by JSON's escapes: its values stay the
    same.
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PrintableFormatter(logging.Formatter):
    """A formatter of log messages that leaves no control character in them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text without characters that control a terminal."""
        message = printable(record.getMessage())
        return super().format(logging.makeLogRecord({**vars(record), "msg": message, "args": None}))


class ProgressLine:
    """One line on stderr that is rewritten in place."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, text: str) -> None:
        """Replace the line."""
        text = printable(text)
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def keep(self) -> None:
        """Leave the line where it is, and go on below it."""
        if self._width:
            sys.stderr.write("\n")
        self._width = 0

    def clear(self) -> None:
        """Remove the line."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
        self._width = 0
