"""Run `plan` in this process: to start another one takes longer than most verbs."""

from __future__ import annotations

import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from planner.cli.main import main


def plan(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one verb in the folder `cwd`."""
    out, err, before = StringIO(), StringIO(), Path.cwd()
    os.chdir(cwd)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(arguments)
    finally:
        os.chdir(before)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
