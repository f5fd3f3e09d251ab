"""Compare the planner's answers with grids of plans made by hand, for cases that are drawn at
random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.kept import ROOT
from planner.cost.candidate import Candidate, StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import PlannerError
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.profile import Profile, load_profile
from planner.schedule.registry import find
from planner.schedule.schedule import Schedule
from planner.solver import search_plan as solve
from planner.solver.by_hand import equal_blocks, equal_time, recomputing
from planner.solver.evaluate.evaluation import priced, simulated
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation

PROFILES = ROOT / "profiles"
SCHEDULES = ("1f1b-flush", "1f1b-flush", "2bw", "1f1b")
HEADERS = (
    "model",
    "GPUs",
    "schedule",
    "memory",
    "best of the grid",
    "s",
    "planner's",
    "s",
    "faster by",
)


def rows(count: int, seed: int, time_limit_s: float) -> Iterator[list[str]]:
    """Yield a line per drawn case: profile, servers, bandwidths, memory and schedule are random."""
    rng, paths = random.Random(seed), sorted(PROFILES.glob("*/*.json"))
    while count:
        profile = load_profile(rng.choice(paths))
        cluster, schedule = _cluster(rng, profile), find(rng.choice(SCHEDULES))
        microbatches = rng.choice((1, 2, 4, 8)) * cluster.gpus if schedule.divides else 1
        made = _best_of_grid(profile, cluster, schedule, microbatches)
        if made is None:
            continue  # nothing by hand fits, so there is nothing to compare with
        count -= 1
        head = [
            profile.model,
            str(cluster.gpus),
            f"{schedule} x{microbatches}",
            f"{(cluster.memory_bytes or 0) / 1e9:.3g} GB",
        ]
        head += [_written(made), f"{made.seconds:.4g}"]
        try:
            own = solve(
                profile,
                cluster,
                schedule=schedule,
                microbatches=microbatches,
                time_limit_s=time_limit_s,
            )
        except PlannerError as refusal:
            yield [*head, refusal.message, "", ""]
            continue
        seconds = own.predicted.seconds_per_minibatch
        yield [*head, own.config, f"{seconds:.4g}", f"{made.seconds / seconds:.3f}x"]


def _cluster(rng: random.Random, profile: Profile) -> Cluster:
    """Draw servers, bandwidths and a memory between a quarter of the model and enough for all of
    it.
    """
    sizes = rng.choice(((2, 1), (4, 1), (8, 1), (4, 2), (4, 4), (8, 2)))
    costs = LayerCosts(profile)
    everything = priced(
        Problem(costs, Setting(hierarchical_cluster((1,), (1e9,)), find("1f1b"))),
        [costs.single_stage],
    )
    inside = 10 ** rng.uniform(8, 11)
    memory_bytes = int(max(everything.price.gpu_bytes) * rng.choice((0.25, 0.4, 0.6, 1.1, 3.0)))
    levels = [size for size in sizes if size > 1]
    return hierarchical_cluster(
        levels, (inside, inside / rng.choice((1, 4, 16)))[: len(levels)], memory_bytes
    )


def _best_of_grid(
    profile: Profile, cluster: Cluster, schedule: Schedule, microbatches: int
) -> Evaluation | None:
    """Return the fastest plan of equal stages that fits: every number of stages, sharded or not,
    recomputing or not.
    """
    costs = LayerCosts(profile)
    setting = Setting(cluster, schedule, microbatches)
    problem = Problem(costs, setting, depth="published", budget=Budget.unlimited())
    plans = (
        priced(problem, stages)
        for stages in _grid(costs, cluster.gpus, microbatches if schedule.divides else None)
    )
    best: Evaluation | None = None
    for plan in sorted(
        (plan for plan in plans if plan.fits(cluster)), key=lambda plan: plan.seconds
    ):
        if best is not None and plan.seconds >= best.seconds:
            break
        evaluation = simulated(problem, plan)
        best = evaluation if best is None or evaluation.seconds < best.seconds else best
    return best


def _grid(costs: LayerCosts, gpus: int, microbatches: int | None) -> Iterator[list[Candidate]]:
    counts = [count for count in range(1, gpus + 1) if gpus % count == 0]
    for count in counts:
        for cut in (equal_blocks(costs, count), equal_time(costs, count)):
            for replicas in counts:
                if (
                    len(cut) != count
                    or count * replicas > gpus
                    or replicas > (microbatches or gpus)
                ):
                    continue
                for sharded in {False, replicas > 1 and costs.profile.may_shard_optimizer}:
                    stages = [
                        replace(stage, options=StageOptions(replicas, sharded)) for stage in cut
                    ]
                    yield stages
                    yield recomputing(costs, stages)


def _written(plan: Evaluation) -> str:
    options: Sequence[StageOptions] = [stage.options for stage in plan.stages]
    how = ("s" if options[0].shards_optimizer else "") + ("r" if options[0].recompute else "")
    return "-".join(str(each.replicas) for each in options) + how
