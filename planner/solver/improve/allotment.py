"""Which GPUs of several kinds the stages of a plan get."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, permutations, product

from planner.cost.candidate import Candidate
from planner.solver.evaluate.evaluation import priced
from planner.solver.evaluate.leaner import Leaner
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation

_Ranks = tuple[tuple[int, ...], ...]  # of each stage


def allotted(problem: Problem, stages: Sequence[Candidate]) -> Iterator[Evaluation]:
    """Yield the plans of these stages on GPUs of the kinds, as far as they are allowed.

    Stages take consecutive GPUs of the kinds in every order, the first stage or the heaviest one first. In small
    clusters other mixtures follow. Stages recompute as memory demands.
    """
    leaner, replicas = Leaner(problem), [stage.replicas for stage in stages]
    kinds = [tuple(ranks) for ranks in problem.cluster.kind_ranks]
    shares_s = [float(problem.layer_costs.work(stage).compute_s) / stage.replicas for stage in stages]
    heaviest = sorted(range(len(stages)), key=lambda number: -shares_s[number])
    orders = [range(len(stages)), heaviest, range(len(stages) - 1, -1, -1)]
    lines = (_in_line(replicas, order, kinds_first) for kinds_first in permutations(kinds) for order in orders)
    most = problem.tuning.improve.most_allotments
    found = dict.fromkeys((*islice(lines, most), *islice(_mixtures(replicas, kinds), most)))
    for ranks in islice(found, most):
        placed = [
            replace(stage, ranks=own, options=replace(stage.options, recompute=()))
            for stage, own in zip(stages, ranks, strict=True)
        ]
        if (plan := leaner.lean_enough(priced(problem, placed).stages)) is not None:
            yield plan


def _in_line(replicas: Sequence[int], order: Sequence[int], kinds: Sequence[Sequence[int]]) -> _Ranks:
    line = chain(*kinds)
    ranks = {number: tuple(sorted(islice(line, replicas[number]))) for number in order}
    return tuple(ranks[number] for number in range(len(replicas)))


def _mixtures(replicas: Sequence[int], free: Sequence[tuple[int, ...]]) -> Iterator[_Ranks]:
    """Yield the first free GPUs of each kind for the stages, for all numbers of each kind."""
    if not replicas:
        yield ()
        return
    for counts in product(*(range(min(len(own), replicas[0]) + 1) for own in free)):
        if sum(counts) == replicas[0]:
            own = tuple(rank for ranks, count in zip(free, counts, strict=True) for rank in ranks[:count])
            left = [ranks[count:] for ranks, count in zip(free, counts, strict=True)]
            yield from ((own, *others) for others in _mixtures(replicas[1:], left))
