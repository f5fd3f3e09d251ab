"""A line of a terminal that is rewritten in place."""

import sys


class ProgressLine:
    """One line on stderr that is rewritten in place."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def keep(self) -> None:
        if self._width:
            sys.stderr.write("\n")
        self._width = 0

    def clear(self) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
        self._width = 0
