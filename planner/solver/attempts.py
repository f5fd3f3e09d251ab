"""What searches are asked in place of a problem, because none can know all of it, and who proposes
plans for it.

    room     How many communicators a worker has depends on the replicas of its neighbours.
             Searches count those that a stage has in any plan. Room is kept for more, until the
             best candidate has it. The first problem of this series is a relaxation, whose bound
             holds for all plans.
    copies   A tied weight is counted once. Where its copies do not fit, or cannot be trained, the
             best plan has all users of the weight in one stage, or counts the weight in every
             layer that uses it.

Candidates are evaluated for the problem itself, and what they lack decides on the next attempt.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from planner.cost.communicators import communicators
from planner.cost.weight_copies import exchanged_bytes
from planner.formats.files import replace
from planner.solver.pool import SEARCH, Batch, Pool
from planner.solver.problem.cut_space import cut_after
from planner.solver.problem.infeasible import without_room
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.propose.chain import propose_chain
from planner.solver.propose.even import (
    counted,
    propose_even,
    uncounted_bytes,
    users_of_tied_weights,
)
from planner.solver.propose.integer import check_solver, propose_program, propose_small_program
from planner.solver.propose.interleaved import propose_interleaved
from planner.solver.propose.mixed import propose_mixed
from planner.solver.propose.regular import propose_regular

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


@dataclass(frozen=True)
class Attempt:
    """A problem whose plans are candidates for another one, and who proposes them.

    Attributes:
        relaxation: whether all plans of the other problem are plans of this one, and take no less
            there.
    """

    problem: Problem
    proposers: tuple[Proposer, ...]
    relaxation: bool = False


def attempts(pool: Pool) -> Iterator[Attempt]:
    """Yield attempts until the pool's best plan is as good as the best candidate that lacked
    something.
    """
    proposers = _proposers_for(pool.problem)
    searched_as = pool.problem.schedule.solved_as
    for number, roomy in enumerate(_with_room(pool)):
        relaxation = number == 0
        if searched_as is not roomy.schedule:
            # Of the other schedule's plans the search knows the cuts, and the pool the time.
            roomy = roomy.with_schedule(searched_as)
            relaxation = False

        yield Attempt(roomy, proposers, relaxation)
        if pool.hopeless:
            return

        yield from _with_copies(pool, roomy, proposers)


def _proposers_for(problem: Problem) -> tuple[Proposer, ...]:
    """Return the proposers of a problem; raise InputError if no method takes it."""
    check_solver(problem)
    if problem.solver == "ilp":
        return (Proposer(propose_program, PROGRAM),)
    if problem.cluster.kinds:
        return (Proposer(propose_mixed), Proposer(propose_small_program, PROGRAM))
    if problem.schedule.chunked:
        return (Proposer(propose_interleaved),)
    return (Proposer(propose_chain),)


def _with_room(pool: Pool) -> Iterator[Problem]:
    """Yield the problem with room for no more communicators than searches count, then for ever
    more of them.
    """
    problem = pool.problem
    if problem.layer_costs.overheads is None:
        yield problem
        return

    least = int(problem.degree > 1)  # the communicator of the ranks that divide layers
    taken_bytes = problem.layer_costs.overheads.reserve(least).fixed_bytes
    if (most_bytes := problem.cluster.most_memory_bytes) is not None and most_bytes <= taken_bytes:
        raise without_room(problem, most_bytes, taken_bytes)

    tuning = problem.tuning
    room = least
    while True:
        pool.crowded = None
        pool.room = room
        yield problem.with_room(room)
        crowded = pool.crowded
        if crowded is None:
            return
        if _price_s(pool.best) <= crowded.seconds * (1 + tuning.evaluate.timing_share):
            return

        needed = _uncounted_communicators(problem, crowded)
        if needed <= room:
            break  # what lacks room are copies of tied weights

        if problem.clock.passed:
            room = needed  # there is no time to find out whether less room does
        elif room < tuning.portfolio.most_single_communicators:
            room += 1
        else:
            room = min(needed, 2 * room)

    if pool.best is None:
        # Stages of one replica have few communicators.
        yield replace(problem.with_room(least), most_replicas=1)


def _uncounted_communicators(problem: Problem, plan: Evaluation) -> int:
    """Return how many communicators a worker of the plan has, at most, beyond those that searches
    count.
    """
    costs = problem.layer_costs
    beyond: Counter[int] = Counter()
    counts = communicators(costs, plan.stages)
    for stage, worker, count in zip(plan.stages, plan.price.workers, counts, strict=True):
        counted = 2 * int(costs.work(stage).neighbours) + (stage.replicas > 1)
        beyond[worker] += count - counted

    return max(beyond.values())


def _with_copies(pool: Pool, roomy: Problem, proposers: tuple[Proposer, ...]) -> Iterator[Attempt]:
    """Yield problems about plans that count every copy of a tied weight, or have none."""
    users = users_of_tied_weights(roomy.layer_costs)
    if not users:
        return

    untrained = pool.untrained
    lacking = untrained is not None and untrained.seconds < _price_s(pool.best)
    if lacking or _copies_are_slow(pool):
        yield Attempt(_in_one_stage(roomy, users), proposers)
    if not lacking:
        return

    if roomy.schedule.stashes and not roomy.cluster.kinds:
        # Copies stay equal where all stages that have one update at the same times.
        yield Attempt(roomy, (Proposer(propose_even),))
    else:
        yield from _with_every_copy(pool, roomy, proposers)


def _with_every_copy(
    pool: Pool, roomy: Problem, proposers: tuple[Proposer, ...]
) -> Iterator[Attempt]:
    """Yield the problem with every copy counted, and with less memory while a candidate lacks room.

    What a stage holds for the sums of a weight depends on the replicas of the other stages that use
    it, which a search does not know. Regular plans have as many in all stages, and hold least.
    """
    copies = counted(roomy, depth=1)
    if not roomy.schedule.chunked:
        yield Attempt(copies, (Proposer(propose_regular),))
    untrained = pool.untrained
    for _ in range(roomy.tuning.propose.most_even_tries):
        pool.untrained = None
        yield Attempt(copies, proposers)
        if pool.untrained is None or pool.problem.clock.passed:
            break

        missing_bytes = uncounted_bytes(roomy, copies, pool.untrained.stages)
        if missing_bytes <= 0:
            break

        less = partial(_less, missing_bytes)
        copies = copies.with_cluster(copies.cluster.with_memory(less))

    if untrained is not None:
        pool.untrained = untrained


def _less(missing_bytes: int, memory_bytes: int) -> int:
    return memory_bytes - missing_bytes


def _in_one_stage(problem: Problem, users: Sequence[tuple[int, ...]]) -> Problem:
    """Return the problem about plans whose stages have all users of a tied weight, or none."""
    layers = range(len(problem.layer_costs.profile.layers))
    inside = {cut for first, *_, last in users for cut in range(first, last)}
    together = cut_after(problem, frozenset(layers) - inside)
    return replace(together, precision=problem.precision)


def _copies_are_slow(pool: Pool) -> bool:
    """Whether messages of copies take so much of the best plan's time that one without copies may
    be faster.
    """
    if pool.best is None:
        return False

    problem = pool.problem
    sent_bytes = max(exchanged_bytes(problem.layer_costs, pool.best.stages))
    slow_s = problem.tuning.portfolio.slow_copies_share * pool.best.seconds
    return sent_bytes / problem.link.bandwidth_bytes_per_s > slow_s


def _price_s(plan: Evaluation | None) -> float:
    """Return the seconds of a plan by the cost model, which candidates are compared with; infinity
    without a plan.
    """
    if plan is None:
        return math.inf
    return plan.price_s
