"""The answer to a request under the max-load objective: which cuts are searched, and what that proves."""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import Ledger
from planner.cost.max_load import held_bytes
from planner.errors import InputError
from planner.schedule.instructions import POSTED
from planner.solver.candidates.deadline import Deadline
from planner.solver.chain.states import uncut_groups
from planner.solver.graph.downsets import enumerate_downsets
from planner.solver.graph.free_layers import Reduced
from planner.solver.graph.lattice import Words, to_words
from planner.solver.integer.loads import LoadSearch
from planner.solver.integer.request import IlpAnswer, Request

MOST_STATES = 60_000


def solve_loads(request: Request, deadline: Deadline) -> IlpAnswer | None:
    """The plan with the smallest largest load, or None when nothing fits; its constraints are the profile's own.

    Raises:
        InputError: for a cluster of several levels.
        TimeoutError: when the deadline passes before there is any plan.
    """
    if len(request.cluster.joined) > 1:
        raise InputError(
            f"the cost model max-load prices clusters of one level, not of {len(request.cluster.joined)}",
            hint="give `gpus` and the bandwidth of the slowest level",
        )
    reduced = Reduced(request.ledger, memory_matters=memory_matters(request))
    whole = request.ledger if request.keeps_order else reduced.ledger
    along = LoadSearch(whole, _prefixes(whole), request.cluster)
    first = along.best(np.inf, deadline)
    every = enumerate_downsets(reduced.ledger, MOST_STATES)
    relaxed_s = sum(layer.forward_s + layer.backward_s + layer.update_s for layer in whole.profile.layers) / (
        sum(kind.count * kind.speed for kind in request.cluster.kinds) or request.cluster.gpus
    )
    best, bound_s = first, relaxed_s
    if every is not None:
        over = LoadSearch(reduced.ledger, every, request.cluster)
        faster = over.best(np.inf if first is None else first.seconds, deadline)
        if not request.keeps_order:
            best = faster or first
        if not over.interrupted and (lowest := faster or first) is not None:
            bound_s = lowest.seconds
    if best is None:
        if deadline.passed:
            raise TimeoutError
        return None
    stages = best.stages if whole is request.ledger else reduced.expand(best.stages)
    bound_s = min(bound_s, best.seconds)
    return IlpAnswer(stages, best.seconds, bound_s, optimal=bound_s == best.seconds)


def memory_matters(request: Request) -> bool:
    """Whether some device could not hold the whole model and all that it moves."""
    limits = [request.cluster.memory_of(kind) for kind in request.kinds]
    moved = sum(value.output_bytes + value.gradient_bytes for value in request.ledger.traffic)
    most = sum(held_bytes(layer) for layer in request.ledger.profile.layers) + POSTED * moved
    return any(limit is not None and limit < most for limit in limits)


def _prefixes(ledger: Ledger) -> Words:
    """The cuts along the profile's order."""
    ends = [0, *(group[-1] + 1 for group in uncut_groups(ledger))]
    return to_words([range(end) for end in ends], len(ledger.profile.layers))
