"""Which GPUs of several kinds the stages of a plan get.

in line      the kinds' GPUs stand in a line, in every order of the kinds; the first stage takes the
             first of them, and so on: by the order of stages, the other way round, or the heaviest
             stage first
mixtures     any number of GPUs of each kind for each stage

A few of both are priced.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice, permutations, product

from planner.cost.candidate import Candidate
from planner.formats.files import replace
from planner.solver.evaluate.evaluation import priced
from planner.solver.evaluate.leaner import Leaner
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation

Ranks = tuple[int, ...]


def allotted(problem: Problem, stages: Sequence[Candidate]) -> Iterator[Evaluation]:
    """Yield the plans of these stages on GPUs of the kinds, as far as they are allowed.

    Stages recompute as memory demands.
    """
    leaner = Leaner(problem)
    for allotment in _allotments(problem, stages):
        placed = []
        for stage, ranks in zip(stages, allotment, strict=True):
            options = replace(stage.options, recompute=())
            placed.append(replace(stage, ranks=ranks, options=options))

        plan = leaner.lean_enough(priced(problem, placed).stages)
        if plan is not None:
            yield plan


def _allotments(problem: Problem, stages: Sequence[Candidate]) -> list[tuple[Ranks, ...]]:
    """Return the ranks of all stages, in the ways to try."""
    replicas = [stage.replicas for stage in stages]
    kinds = [tuple(ranks) for ranks in problem.cluster.kind_ranks]

    most = problem.tuning.improve.most_allotments
    in_line = islice(_in_line(replicas, kinds, _orders(problem, stages)), most)
    mixtures = islice(_mixtures(replicas, kinds), most)
    distinct = dict.fromkeys([*in_line, *mixtures])
    return [*islice(distinct, most)]


def _orders(problem: Problem, stages: Sequence[Candidate]) -> list[Sequence[int]]:
    """Return the orders in which stages take GPUs."""
    shares_s = [
        float(problem.layer_costs.work(stage).compute_s) / stage.replicas for stage in stages
    ]
    numbers = range(len(stages))
    heaviest_first = sorted(numbers, key=lambda number: -shares_s[number])
    return [numbers, heaviest_first, numbers[::-1]]


def _in_line(
    replicas: Sequence[int],
    kinds: Sequence[Ranks],
    orders: Sequence[Sequence[int]],
) -> Iterator[tuple[Ranks, ...]]:
    for line in permutations(kinds):
        for order in orders:
            free = chain(*line)
            taken = {number: tuple(sorted(islice(free, replicas[number]))) for number in order}
            yield tuple(taken[number] for number in range(len(replicas)))


def _mixtures(replicas: Sequence[int], free: Sequence[Ranks]) -> Iterator[tuple[Ranks, ...]]:
    """Yield the first free GPUs of each kind for the stages, for all numbers of each kind."""
    if not replicas:
        yield ()
        return

    needed, *others_needed = replicas
    numbers = [range(min(len(ranks), needed) + 1) for ranks in free]
    for counts in product(*numbers):
        if sum(counts) != needed:
            continue

        members: list[int] = []
        left: list[Ranks] = []
        for ranks, count in zip(free, counts, strict=True):
            members += ranks[:count]
            left.append(ranks[count:])
        for others in _mixtures(others_needed, left):
            yield (tuple(members), *others)
