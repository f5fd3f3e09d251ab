"""Run CBC, the solver of integer programs that PuLP carries, as a process that ends when nobody
waits any more.

PuLP writes the program and reads the solution. Its own way to run CBC waits for as long as that
takes, and leaves CBC in the foreground of the terminal: Ctrl-C then ends CBC, which looks as if
time had run out.
"""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Literal

import pulp

from planner.formats.held_folder import held_folder
from planner.solver.tuning.record import STANDARD
from planner.solver.tuning.searches import IntegerTuning

# "feasible" if time ran out with a solution, "unknown" if it ran out without one.
Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_FEASIBILITY = 1e-9  # how far a row may be violated
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PATH = pulp.PULP_CBC_CMD.pulp_cbc_path  # the one that PuLP carries


def run(
    problem: pulp.LpProblem,
    time_limit_s: float | None = None,
    stop: Event | None = None,
    tuning: IntegerTuning = STANDARD.integer,
) -> Status:
    """Minimise `problem`; its variables have values when the status is "optimal" or "feasible".

    PuLP's report needs care. After a time-out `status` reads Optimal; only `sol_status == 1` means
    optimal. An infeasible program still has values. CBC's "Integer infeasible" leaves `sol_status`
    at "none found".

    Args:
        problem: the program.
        time_limit_s: how long CBC may take.
        stop: once it is set, CBC is ended, and the status is "unknown".
        tuning: the least time that CBC has, and how often `stop` is looked at.
    """
    with held_folder("cbc") as folder:
        problem.solve(_Cbc(folder, time_limit_s, stop or Event(), tuning))
    if problem.sol_status == pulp.LpSolutionOptimal:
        return "optimal"
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return "feasible"
    if pulp.LpStatusInfeasible in (problem.status, problem.sol_status):
        return "infeasible"
    return "unknown"


class _Cbc(pulp.COIN_CMD):  # type: ignore[misc]  # PuLP has no types
    """PuLP's command for CBC, with files in a folder that is there, and an event that ends it."""

    def __init__(
        self,
        folder: Path,
        time_limit_s: float | None,
        stop: Event,
        tuning: IntegerTuning,
    ) -> None:
        limit_s = None
        if time_limit_s is not None:
            limit_s = max(time_limit_s, tuning.least_limit_s)
        options = [f"primalTolerance {_FEASIBILITY}", f"integerTolerance {_FEASIBILITY}"]

        # With more threads, the same program may have another of its best solutions.
        super().__init__(
            path=_PATH,
            msg=False,
            threads=1,
            gapRel=0.0,
            gapAbs=0.0,
            timeLimit=limit_s,
            options=options,
        )

        self._folder = folder
        self._stop = stop
        self._poll_s = tuning.poll_s

    def actualSolve(self, lp: pulp.LpProblem, **_: Any) -> int:  # noqa: N802 - PuLP calls it
        """Solve a program, and give its variables their values."""
        program = self._folder / "program.mps"
        solution = self._folder / "solution.sol"
        variables, names, rows, _ = lp.writeMPS(str(program), rename=1)

        if not self._run(program, solution):
            lp.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)
            return int(pulp.LpStatusNotSolved)

        status, values, *_, found = self.readsol_MPS(str(solution), lp, variables, names, rows)
        lp.assignVarsVals(values)
        lp.assignStatus(status, found)
        return int(status)

    def _run(self, program: Path, solution: Path) -> bool:
        """Run CBC to its end, and return True; False where it was told to stop."""
        limit = []
        if self.timeLimit is not None:
            limit = ["-sec", str(self.timeLimit)]
        options = [
            part for option in self.options + self.getOptions() for part in f"-{option}".split()
        ]
        command = [self.path, str(program), *limit, *options]
        command += ["-solve", "-printingOptions", "all", "-solution", str(solution)]

        nowhere = subprocess.DEVNULL

        # In a session of its own, so that Ctrl-C in a terminal is for this process alone.
        process = subprocess.Popen(
            command,
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,
            preexec_fn=_ending_with_parent(),
        )

        try:
            while not self._stop.is_set():
                try:
                    code = process.wait(self._poll_s)
                except subprocess.TimeoutExpired:
                    continue
                if code != 0 or not solution.exists():
                    raise OSError(
                        f"the solver CBC ended with exit code {code} and without an answer"
                    )
                return True

            return False
        finally:
            process.kill()
            process.wait()


def _ending_with_parent() -> Callable[[], object] | None:
    """Return what a new process calls to be killed when this one ends, however it ends; None where
    there is no way.
    """
    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, int(signal.SIGKILL))
