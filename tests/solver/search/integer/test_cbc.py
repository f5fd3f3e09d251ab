"""CBC ends when nobody waits for it any more, however who waited has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT_S = 60

# Solves a program that takes CBC very long, a market split, and prints the number of CBC's process.
SOLVES = """
import random, subprocess
import pulp
from planner.solver.search.integer import cbc

class Shown(subprocess.Popen):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        print(self.pid, flush=True)

random.seed(1)
program = pulp.LpProblem("market", pulp.LpMinimize)
bought = [pulp.LpVariable(f"bought{number}", cat="Binary") for number in range(40)]
missing = []
for row in range(5):
    sizes = [random.randint(0, 99) for _ in bought]
    more, less = pulp.LpVariable(f"more{row}", 0), pulp.LpVariable(f"less{row}", 0)
    missing += [more, less]
    program += pulp.lpDot(sizes, bought) + more - less == sum(sizes) // 2
program += pulp.lpSum(missing)
subprocess.Popen = Shown
cbc.run(program)
"""


def runs(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere no process is told that its parent has ended"
)
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_that_ends_the_search_ends_cbc(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SOLVES], stdout=subprocess.PIPE, text=True
    ) as search:
        assert search.stdout is not None
        solver = int(search.stdout.readline())
        assert runs(solver)
        search.send_signal(number)

    deadline = time.monotonic() + TIMEOUT_S
    while runs(solver):
        assert time.monotonic() < deadline, "CBC goes on"
        time.sleep(0.05)
