"""Which proposers a problem has."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.solver.pool import SEARCH, Batch, Pool
from planner.solver.problem.problem import Problem
from planner.solver.propose.chain import propose_chain
from planner.solver.propose.integer import check_solver, propose_program, propose_small_program
from planner.solver.propose.interleaved import propose_interleaved
from planner.solver.propose.mixed import propose_mixed

PROGRAM = "ilp, CBC"


@dataclass(frozen=True)
class Proposer:
    """A method that yields candidates for a problem, the promising ones first, while looking at
    the pool.

    Attributes:
        propose: yields batches of candidates; raises OutOfTimeError and the errors of
            `planner.solver.portfolio`.
        method: its name in the answer.
    """

    propose: Callable[[Problem, Pool], Iterator[Batch]]
    method: str = SEARCH


def proposers_for(problem: Problem) -> tuple[Proposer, ...]:
    """Return the proposers of a problem; raise InputError if no method takes it."""
    check_solver(problem)
    if problem.solver == "ilp":
        return (Proposer(propose_program, PROGRAM),)
    if problem.cluster.kinds:
        return (Proposer(propose_mixed), Proposer(propose_small_program, PROGRAM))
    if problem.schedule.chunked:
        return (Proposer(propose_interleaved),)
    return (Proposer(propose_chain),)
