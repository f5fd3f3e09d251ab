"""Find the commands that a page tells its reader to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
_START = re.compile(r"(?:\$ )?((?:plan [a-z]|torchrun |python3? |cd |sbatch |kubectl |\w+=\S+ \./).*)")


@dataclass(frozen=True)
class Command:
    """One command of a page, on one line."""

    page: Path
    line: int
    text: str
    not_run: str  # why not, or ""

    @property
    def words(self) -> list[str]:
        """As the shell splits it, without comments."""
        return shlex.split(self.text, comments=True)


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands in the indented blocks of a page, continued lines joined.

    A comment `<!-- not run: why -->` holds for the block that follows it.
    """
    reason, block, joined, start = "", False, "", 0
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        fenced ^= line.startswith("```")
        if fenced:
            continue
        indented = line.startswith("    ")
        if joined:
            joined, line = "", joined + " " + line.strip()
        elif indented:
            block, start, line = True, number, line.strip()
        elif line.strip():
            found = _NOT_RUN.fullmatch(line.strip())
            reason = found[1] if found else "" if block or not line.startswith("<!--") else reason
            block = False
            continue
        else:
            continue
        if line.endswith("\\"):
            joined = line[:-1].rstrip()
        elif command := _START.fullmatch(line):
            yield Command(page, start, command[1], reason)
