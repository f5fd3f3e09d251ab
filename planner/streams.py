"""The streams that a process begins with, as whoever starts it leaves them: closed, or of a few
characters.
"""

import os
import sys
from typing import TextIO, cast


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable before anything is printed or opened.

    A stream that is closed leads nowhere from now on, also in the processes that this one starts.
    Otherwise the next file that is opened has its number, and gets what others print. A character
    that a stream cannot encode is shown by its escape in Python.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not a notebook's or a test's
            stream.reconfigure(errors="backslashreplace")

    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return

    # The lowest numbers that are free: those of the streams.
    nowhere = os.open(os.devnull, os.O_RDWR)
    while nowhere <= 2:
        os.set_inheritable(nowhere, True)
        nowhere = os.dup(nowhere)

    os.close(nowhere)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = _stream(number, mode)
            setattr(sys, name, stream)
            # by which a stream that somebody put in its place is known
            setattr(sys, f"__{name}__", stream)


def _stream(number: int, mode: str) -> TextIO:
    return cast(
        "TextIO",
        os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False),
    )


def encodable_json(text: str, encoding: str | None) -> str:
    """Replace characters of a JSON document that an encoding lacks by JSON's escapes: its values
    stay the same.
    """
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return "".join(
            character if character.isascii() else _escaped(character) for character in text
        )
    return text


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", errors="surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))
