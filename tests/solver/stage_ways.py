"""The ways to run one stage that brute force over all plans has to combine: shared by a benchmark
and by tests.

What a stage takes and holds comes from `LayerCosts` and the cost models, one stage at a time. The
time of a plan is the largest of its stages' times, or their sum and their largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, product

from planner.cost.candidate import Candidate, Groups, StageOptions, whole_stage
from planner.cost.recomputation import units_of
from planner.options.solving import RecomputeRule
from planner.solver.problem.problem import Problem

Times = tuple[float, float]  # a stage's parts of the sum over the stages, and of the maximum
Way = tuple[Times, Candidate]


def unbeaten(problem: Problem, stages: Iterable[Candidate], after: int) -> list[Way]:
    """Return those of the ways to run a stage that fit the memory and that no other one beats in
    both parts.

    Args:
        problem: whose limits hold.
        stages: the same layers and GPUs, run in each way.
        after: GPUs of all later stages.
    """
    fitting = (stage for stage in stages if _fits(problem, stage, after))
    kept: list[Way] = []
    for times, stage in sorted(
        ((_times(problem, stage), stage) for stage in fitting), key=lambda way: way[0]
    ):
        if not kept or times[1] < kept[-1][0][1]:
            kept.append((times, stage))
    return kept


def combined(ways: Iterable[Sequence[Way]]) -> Iterator[tuple[float, tuple[Candidate, ...]]]:
    """Yield the seconds and the stages of every plan that takes one of the ways for each of its
    stages.
    """
    for chosen in product(*ways):
        seconds = sum(times[0] for times, _ in chosen) + max(times[1] for times, _ in chosen)
        yield seconds, tuple(stage for _, stage in chosen)


def options_of(problem: Problem, layers: frozenset[int], replicas: int) -> list[StageOptions]:
    """Return all ways to run a stage of these layers that the rules allow."""
    units = [frozenset(unit) for unit in units_of(problem.layer_costs, layers)]
    some = (tuple(compress(units, flags)) for flags in product((False, True), repeat=len(units)))
    groups: dict[RecomputeRule, list[Groups]] = {
        "auto": list(dict.fromkeys((*some, whole_stage(layers)))),
        "never": [()],
        "always": [whole_stage(layers)],
        "blocks": [tuple(units)],
    }
    sharded: tuple[bool, ...] = (False,)
    if replicas > 1 and problem.layer_costs.profile.may_shard_optimizer:
        sharded = {"auto": (False, True), "never": (False,), "always": (True,)}[
            problem.rules.shard_optimizer
        ]
        if replicas > problem.limits.most_sharded:
            sharded = tuple(each for each in sharded if not each)  # idle replicas get no part
    return [
        StageOptions(replicas, each, again)
        for each in sharded
        for again in groups[problem.rules.recompute]
    ]


def _times(problem: Problem, stage: Candidate) -> Times:
    work = problem.layer_costs.work(stage)
    if problem.schedule.asynchronous:
        return 0.0, float(problem.asynchronous().stage_s(work, stage.replicas))
    model = problem.synchronous()
    return float(model.sum_s(work)), float(model.max_s(work, stage.replicas))


def _fits(problem: Problem, stage: Candidate, after: int) -> bool:
    schedule, late = problem.schedule, problem.rules.max_staleness
    flying = schedule.in_flight(stage.replicas, after, problem.microbatches)
    if schedule.divides and stage.replicas > problem.microbatches:
        return False  # would idle
    if not schedule.versions_suffice(problem.microbatches, stage.replicas, flying):
        return False
    if late is not None and schedule.staleness(flying) > late:
        return False
    footprint = problem.layer_costs.footprint(stage).divided(problem.microbatches)
    limit = problem.cluster.memory_of(stage.options.kind)
    return limit is None or float(footprint.total_bytes(flying, schedule.versions(flying))) <= limit
