"""Try every plan of a small model, one by one: the oracle of the tests.

It shares the formulas with the search, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from planner.cost.candidate import Candidate
from planner.cost.kinds import kind_on
from planner.cost.layer_costs import LayerCosts
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.problem.states import uncut_groups
from tests.solver.stage_ways import options_of

MOST_LAYERS = 10
RESOLUTION = 1e-11  # relative difference of times that count as equal


def brute_force(problem: Problem, *, in_order: bool = True) -> Evaluation | None:
    """Return the fastest plan in the profile's order, or with any cuts, that fits the memory; or
    None.

    Among equally fast plans, fewer GPUs win, then fewer stages, then fewer stages that recompute.

    Args:
        problem: of ten layers at most.
    """
    layer_costs, cluster = problem.layer_costs, problem.cluster
    assert len(layer_costs.profile.layers) <= MOST_LAYERS, "the plans of more layers are too many"
    best: Evaluation | None = None
    every = (
        interleaved_plans(problem)
        if problem.schedule.chunked
        else plans(problem, cluster.gpus, in_order=in_order)
    )
    for stages in every:
        plan = Evaluation(stages, problem.price(stages))
        if not problem.allows(plan):
            continue
        if best is None or _beats(plan, best):
            best = plan
    return best


def plans(
    problem: Problem, gpus: int, *, in_order: bool = True, most_replicas: int | None = None
) -> Iterator[tuple[Candidate, ...]]:
    """Yield all chains of legal cuts in all ways to run each stage, with all numbers of GPUs of
    each kind.

    The cuts are those along the profile's order, or all of the graph.
    """
    layer_costs = problem.layer_costs
    cuts = [
        done
        for done in downsets(layer_costs)
        if not in_order or done == frozenset(range(len(done)))
    ]
    everything = frozenset(range(len(layer_costs.profile.layers)))

    def extend(
        before: frozenset[int], free: tuple[tuple[int, ...], ...]
    ) -> Iterator[tuple[Candidate, ...]]:
        for after in cuts:
            if not before < after:
                continue
            for counts in product(*(range(len(ranks) + 1) for ranks in free)):
                if not 1 <= sum(counts) <= (most_replicas or gpus):
                    continue
                ranks = [
                    rank for own, count in zip(free, counts, strict=True) for rank in own[:count]
                ]
                rest = tuple(own[count:] for own, count in zip(free, counts, strict=True))
                for stage in _ways(problem, before, after - before, ranks):
                    if after == everything:
                        yield (stage,)
                    else:
                        yield from ((stage, *others) for others in extend(after, rest))

    return extend(
        frozenset(), tuple(map(tuple, problem.cluster.kind_ranks)) or (tuple(range(gpus)),)
    )


def _ways(
    problem: Problem, before: frozenset[int], layers: frozenset[int], ranks: list[int]
) -> Iterator[Candidate]:
    """Yield all ways to run a stage on as many GPUs, or on these where they differ."""
    for options in options_of(problem, layers, len(ranks)):
        stage = Candidate(before, layers, options)
        if problem.cluster.kinds:
            kind = kind_on(problem.layer_costs, problem.cluster, stage, ranks)
            stage = replace(stage, ranks=tuple(ranks), options=replace(options, kind=kind))
        yield stage


def interleaved_plans(problem: Problem) -> Iterator[tuple[Candidate, ...]]:
    """Yield all chains of legal cuts into equally many stages for each of two workers or more, in
    any number of copies.

    Each copy has at least as many microbatches as workers.
    """
    layer_costs = problem.layer_costs
    for stages in plans(problem, len(layer_costs.profile.layers), most_replicas=1):
        workers, rest = divmod(len(stages), problem.setting.chunks)
        if rest == 0 and workers >= 2:
            for copies in range(1, problem.cluster.gpus // workers + 1):
                if problem.microbatches // copies >= workers:
                    yield from _copied(problem, stages, copies)


def _copied(
    problem: Problem, stages: tuple[Candidate, ...], copies: int
) -> Iterator[tuple[Candidate, ...]]:
    """Yield the stages on so many replicas each, sharded in all ways that the rules allow."""
    ways = [
        [
            each
            for each in options_of(problem, stage.layers, copies)
            if each.recompute == stage.options.recompute
        ]
        for stage in stages
    ]
    for options in product(*ways):
        yield tuple(
            replace(stage, options=each) for stage, each in zip(stages, options, strict=True)
        )


def downsets(layer_costs: LayerCosts, *, of_plans: bool = True) -> list[frozenset[int]]:
    """Return the sets of layers that hold all predecessors of their layers and respect
    `no_cut_after`.

    In plans, the last layer, which has the loss, is in no set but that of all layers. Of a model
    that may be trained, gradients add up in the order in which one process adds them: see
    `adds_in_order`.
    """
    count = len(layer_costs.profile.layers)
    joined = [layer_costs.position[name] for name in layer_costs.profile.no_cut_after]
    subsets = (
        frozenset(index for index in range(count) if bits >> index & 1) for bits in range(2**count)
    )
    return [
        done
        for done in subsets
        if all(
            value.producer in done
            for value in layer_costs.traffic
            if done.intersection(value.users)
        )
        and all((index in done) == (index + 1 in done) for index in joined if index + 1 < count)
        and (not of_plans or _may_be_cut(layer_costs, done))
    ]


def _may_be_cut(layer_costs: LayerCosts, done: frozenset[int]) -> bool:
    """Whether plans may have a cut behind these layers."""
    count = len(layer_costs.profile.layers)
    return (len(done) == count or count - 1 not in done) and adds_in_order(layer_costs, done)


def adds_in_order(layer_costs: LayerCosts, done: frozenset[int]) -> bool:
    """Whether the gradients of every value add up in the order of its users, from the last to the
    first.

    They add up stage by stage, from the last to the first, and then in the order of the users.
    `done` are the layers before a cut. Users that no cut separates are one.
    """
    if not layer_costs.profile.trainable:
        return True
    for value in layer_costs.traffic:
        if not value.gradient_bytes:
            continue
        runs = [
            [user for user in value.users if user in group] for group in uncut_groups(layer_costs)
        ]
        users = [run[0] for run in runs if run]
        plain = sorted(users, reverse=True)
        added = sorted(users, key=lambda user: (user in done, -user))
        if added != plain:
            return False
    return True


def _beats(plan: Evaluation, best: Evaluation) -> bool:
    if abs(plan.seconds - best.seconds) > RESOLUTION * best.seconds:
        return plan.seconds < best.seconds
    return rank(plan) < rank(best)


def rank(plan: Evaluation) -> tuple[int, int, int]:
    """Return what decides between equally fast plans."""
    return plan.gpus, len(plan.stages), sum(bool(stage.options.recompute) for stage in plan.stages)
