"""Colours of answers on a terminal that has them: what does not fit, what is stale, and what limits
a plan.

https://no-color.org: nothing is coloured where NO_COLOR is set.
"""

import os
import re
from typing import TextIO

_RED = "\x1b[31m"
_YELLOW = "\x1b[33m"
_BOLD = "\x1b[1m"
_PLAIN = "\x1b[0m"
_STYLES = (
    (
        re.compile(
            r"does not fit(?: \([^)]*\))?|TRAINING MAY NOT CONVERGE|no plan fits", re.IGNORECASE
        ),
        _RED,
    ),
    (re.compile(r"gradients up to \d+ updates? stale|up to \d+ updates? stale"), _YELLOW),
    (re.compile(r"^limited by\s.*$", re.MULTILINE), _BOLD),
)


def has_colours(stream: TextIO) -> bool:
    """Return whether what is printed there may have colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str) -> str:
    """Return an answer with colours."""
    for pattern, style in _STYLES:
        text = pattern.sub(rf"{style}\g<0>{_PLAIN}", text)
    return text
