"""Solve integer programs through PuLP: with HiGHS if highspy is installed, otherwise with CBC, which PuLP carries.

PuLP's report of a solution needs care. After a time-out `status` reads Optimal; only `sol_status == 1` means optimal.
An infeasible program still has values of its variables. CBC's "Integer infeasible" leaves `sol_status` at "none found".
`run` turns all that into one of four words.
"""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pulp

MilpName = Literal["HiGHS", "CBC"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_FEASIBILITY = 1e-9  # how far a row may be violated
_LEAST_LIMIT_S = 0.1
_PRINTED = 1e-3  # CBC prints its bound to three decimals
_CBC = pulp.PULP_CBC_CMD.pulp_cbc_path  # the one that PuLP carries


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        status: "feasible" if time ran out with a solution, "unknown" if it ran out without one.
        bound: no solution has a smaller objective; minus infinity if the solver reports none.
    """

    status: Status
    bound: float = -math.inf


def installed() -> tuple[MilpName, ...]:
    """Return the solvers that are installed, the preferred one first."""
    at_hand = {"HiGHS": pulp.HiGHS(msg=False).available(), "CBC": pulp.COIN_CMD(path=_CBC, msg=False).available()}
    return tuple(name for name in get_args(MilpName) if at_hand[name])


def run(problem: pulp.LpProblem, name: MilpName, time_limit_s: float | None = None) -> Outcome:
    """Minimise `problem`; its variables have values when the status is "optimal" or "feasible"."""
    limit_s = None if time_limit_s is None else max(time_limit_s, _LEAST_LIMIT_S)
    return _run_highs(problem, limit_s) if name == "HiGHS" else _run_cbc(problem, limit_s)


def _run_highs(problem: pulp.LpProblem, limit_s: float | None) -> Outcome:
    solver = pulp.HiGHS(
        msg=False,
        threads=1,  # with more threads, the same program may have another of its best solutions
        gapRel=0.0,
        gapAbs=0.0,
        timeLimit=limit_s,
        mip_feasibility_tolerance=_FEASIBILITY,
        primal_feasibility_tolerance=_FEASIBILITY,
    )
    problem.solve(solver)
    return _outcome(problem, float(problem.solverModel.getInfo().mip_dual_bound))


def _run_cbc(problem: pulp.LpProblem, limit_s: float | None) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "cbc.log"
        solver = pulp.COIN_CMD(
            path=_CBC,
            msg=False,
            threads=1,
            gapRel=0.0,
            gapAbs=0.0,
            timeLimit=limit_s,
            logPath=str(log),
            options=[f"primalTolerance {_FEASIBILITY}", f"integerTolerance {_FEASIBILITY}"],
        )
        solver.tmpDir = folder
        problem.solve(solver)
        said = re.findall(r"^Lower bound:\s+(\S+)$", log.read_text(), re.MULTILINE)
    return _outcome(problem, float(said[-1]) - _PRINTED if said else -math.inf)


def _outcome(problem: pulp.LpProblem, bound: float) -> Outcome:
    if problem.sol_status == pulp.LpSolutionOptimal:
        return Outcome("optimal", float(problem.objective.value() or 0.0))
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return Outcome("feasible", bound if math.isfinite(bound) else -math.inf)
    if pulp.LpStatusInfeasible in (problem.status, problem.sol_status):
        return Outcome("infeasible")
    return Outcome("unknown", bound if math.isfinite(bound) else -math.inf)
