"""Find the commands and the Python scripts that a page tells its reader to type."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
_START = re.compile(
    r"(?:\$ )?((?:plan [a-z]|torchrun |python3? |cd |sbatch |kubectl |\w+=\S+ \./).*)"
)
_PYTHON = re.compile(r"(?:import|from) \w")


@dataclass(frozen=True)
class Command:
    """One command of a page, on one line, or a script for Python's standard input."""

    page: Path
    line: int
    text: str
    not_run: str  # why not, or ""

    @property
    def words(self) -> list[str]:
        """As the shell splits its first line, without comments."""
        return shlex.split(self.text.split("\n")[0], comments=True)


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands in the indented blocks of a page, continued lines joined.

    A comment `<!-- not run: why -->` holds for the block that follows it.
    """
    reason, fenced = "", False
    block: list[str] = []
    for number, line in enumerate([*page.read_text(encoding="utf-8").split("\n"), "the end"], 1):
        fenced ^= line.startswith("```")
        if block and line and _indent(line) < _indent(block[0]):
            yield from _in_block(page, number - len(block), block, reason)
            block, reason = [], ""
        if not fenced and (line.startswith("    ") or (block and not line)):
            block.append(line)
        elif line and not fenced:
            found = _NOT_RUN.fullmatch(line)
            reason = found[1] if found else reason if line.startswith("<!--") else ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _in_block(page: Path, first: int, lines: Sequence[str], reason: str) -> Iterator[Command]:
    script = textwrap.dedent("\n".join(lines)).strip()
    if _PYTHON.match(script):
        yield Command(page, first, f"python - <<'END'\n{script}\nEND", reason)
        return
    joined, start = "", first
    for number, line in enumerate(lines, first):
        start = start if joined else number
        joined = f"{joined} {line.strip()}".strip()
        if joined.endswith("\\"):
            joined = joined[:-1].rstrip()
            continue
        if command := _START.fullmatch(joined):
            yield Command(page, start, command[1], reason)
        joined = ""
