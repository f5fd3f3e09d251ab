"""Run a command as a user does, and say what time and memory it took."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kept import ROOT


@dataclass(frozen=True)
class Process:
    """What a command took: wall seconds, processor seconds with its children, and its largest
    process in bytes.
    """

    wall_s: float
    cpu_s: float
    peak_bytes: int
    out: str


def run(
    command: Sequence[str | Path], folder: Path | None = None, codes: Sequence[int] = (0,)
) -> Process:
    """Run a command to its end.

    Raises:
        RuntimeError: with what it wrote, where it ends with another code than `codes`.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        child = subprocess.Popen([*map(str, command)], cwd=folder or ROOT, stdout=out, stderr=err)
        _, status, used = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if child.returncode not in codes:
            raise RuntimeError(
                f"{' '.join(map(str, command))} ended with {child.returncode}: "
                f"{err.read().decode()}"
            )
        return Process(
            wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, out.read().decode()
        )


def plan(
    *arguments: str | Path, folder: Path | None = None, codes: Sequence[int] = (0,)
) -> Process:
    """Run `plan` with these arguments, as a user does."""
    return run([sys.executable, "-m", "planner", *arguments], folder, codes)
