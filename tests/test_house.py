"""Rules of the house that no linter knows."""

import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "planner"
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_OTHER_PROGRAMS = re.compile(r"torchrun|--(nnodes|nproc-per-node|node-rank|rdzv-\w+|master-\w+)")
# Rooms that write command lines of other systems, or scripts with options of their own.
_EXPORTS = ("exports/megatron.py", "exports/torch_pipelining.py")
_STILL = ("executor/run/", "model/", "profiler/")  # being rewritten


def test_only_the_command_line_knows_flags() -> None:
    """Messages of the library name arguments, `accumulate=0`; `planner.cli.flags` shows them as flags."""
    assert not list(_lines_with_flags())


def _lines_with_flags() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(("cli/", *_STILL)) or place in _EXPORTS:
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            if _FLAG.search(line) and not _OTHER_PROGRAMS.search(line):
                yield f"{place}:{number}: {line.strip()}"
