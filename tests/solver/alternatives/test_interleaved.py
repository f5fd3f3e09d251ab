"""Regular interleaved plans: the fastest of all shapes, within the memory, and trained as they are
planned.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.options.solving import SolveOptions, StageRules
from planner.options.verbs import FitOptions
from planner.plan.trainable import check_trainable
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.one_stage import FLUSH
from planner.simulator.simulate_plan import simulated_s
from planner.solver.alternatives.interleaved import interleaved, prefer_interleaved_if_faster
from planner.solver.by_hand import equal_blocks
from planner.solver.clock import Clock
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.find_plan import find_plan
from planner.solver.fit import FitRequest, fit
from planner.solver.problem.problem import Problem
from planner.solver.propose.regular import regular_plans
from planner.solver.request import Request
from planner.solver.sizes.microbatches import Profiles
from tests.plan.test_blocks import transformer

MODEL = transformer(16, "h.{block}.part{part}")
WEIGHT = 10**6  # bytes of each layer, over links of so many a second


def problem_on(
    gpus: int, microbatches: int, memory: int | None = None, rules: StageRules | None = None
) -> Problem:
    # Whole-model replicas would take long to average their gradients.
    heavy = [
        each.model_copy(update={"weight_bytes": WEIGHT, "gradient_bytes": WEIGHT})
        for each in MODEL.layers
    ]
    saving = [each.model_copy(update={"saved_bytes": WEIGHT // 5}) for each in heavy]
    costs = LayerCosts(MODEL.model_copy(update={"layers": tuple(saving)}))
    return Problem(
        costs, Setting(flat_cluster(gpus, 1e6, memory), FLUSH, microbatches), rules or StageRules()
    )


def test_the_fastest_shape_is_the_answer() -> None:
    problem, found = problem_on(4, 8), dict[tuple[int, int], float]()
    for workers, copies in ((2, 2), (4, 1)):
        for chunks in range(2, 16 // workers + 1):
            own = replace(
                problem, setting=replace(problem.setting, schedule=INTERLEAVED, chunks=chunks)
            )
            stages = equal_blocks(problem.layer_costs, workers * chunks)
            copied = [
                replace(each, options=replace(each.options, replicas=copies)) for each in stages
            ]
            found[workers, chunks] = evaluate(own, copied).seconds
    best = interleaved(problem, 1e9)
    own, plan = best.problem, best.best
    assert plan is not None
    # By the cost model, which differs from the simulation by that of the buckets of gradients.
    assert plan.seconds * 0.9 <= best.bound_s <= min(found.values()) * 1.01
    workers = len(plan.stages) // own.setting.chunks
    assert plan.simulated
    assert plan.seconds == pytest.approx(found[workers, own.setting.chunks])
    # three of them were simulated, the best by the cost model
    assert plan.seconds <= min(found.values()) * 1.05
    assert interleaved(problem, plan.seconds * 0.9).best is None


def test_memory_decides_how_many_chunks_recompute() -> None:
    roomy = interleaved(problem_on(4, 8), 1e9).best
    assert roomy is not None
    whole = max(roomy.price.gpu_bytes)
    tight = problem_on(4, 8, int(whole * 0.99))
    found = interleaved(tight, 1e9).best
    never = interleaved(replace(tight, rules=StageRules(recompute="never")), 1e9).best
    assert found is not None
    assert tight.allows(found)
    assert any(stage.options.recompute for stage in found.stages)
    assert never is not None
    assert not any(stage.options.recompute for stage in never.stages)
    assert roomy.seconds < found.seconds < never.seconds
    nothing = interleaved(problem_on(4, 8, WEIGHT), 1e9)
    assert (nothing.best, nothing.bound_s) == (None, math.inf)


def test_pipelines_use_all_gpus_also_where_their_number_is_no_power_of_two() -> None:
    """As 35 stages on 35 groups of 8 GPUs, which a search over halves never met (Korthikanti et al.
    2022).
    """
    problem = problem_on(7, 14, 40 * WEIGHT)
    depths = {(len(plan.stages), plan.stages[0].replicas) for plan in regular_plans(problem)}
    assert (7, 1) in depths


def test_fit_answers_with_an_interleaved_plan_where_that_is_faster() -> None:
    # Eight stages have a bubble of 7 to 8 microbatches, and a fraction of it with several chunks.
    profile = problem_on(8, 8).layer_costs.profile

    def cluster_of(gpus: int) -> Cluster:
        return flat_cluster(gpus, 1e6, 40 * WEIGHT)

    def answer(options: SolveOptions) -> Plan | None:
        profiles = Profiles(lambda size: profile, lambda undivided: undivided, (4,))
        return fit(FitRequest(profiles, 8, cluster_of, options, Clock()))[0].asked.plan

    plain = answer(FitOptions(schedule="1f1b-flush", microbatches=8))
    plan = answer(FitOptions(microbatches=8))
    named = answer(FitOptions(schedule="1f1b-flush").with_minibatch(32))
    assert plain is not None
    assert plan is not None
    assert named is not None
    assert plain.schedule is named.schedule is FLUSH
    assert plan.schedule is INTERLEAVED
    assert plan.predicted.seconds_per_minibatch < plain.predicted.seconds_per_minibatch * 0.98
    assert plan.solver.lower_bound_s <= plan.predicted.seconds_per_minibatch
    # By regular interleaved plans and by those with one stage per GPU, which are both slower than
    # perfect balance.
    assert plan.solver.gap < 0.1
    assert plan.solver.bound_of.endswith("chunks of equally many blocks")
    assert not max(map(plan.lacking_bytes, range(len(plan.stages))))
    assert plan.baselines == plain.baselines
    assert plan.predicted.seconds_per_minibatch == pytest.approx(simulated_s(plan))
    check_trainable(plan)


def test_who_asks_for_one_cost_model_or_solver_gets_that() -> None:
    problem = problem_on(4, 8)
    options = SolveOptions(schedule=FLUSH, microbatches=8)
    request = Request(problem.layer_costs.profile, problem.cluster, options, Clock())
    plan = find_plan(request)
    program = request.with_options(replace(options, solver="ilp"))
    assert prefer_interleaved_if_faster(plan, program) is plan
