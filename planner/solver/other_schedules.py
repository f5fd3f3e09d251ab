"""Plans for schedules that no search along the cuts can price: vertical sync, zb-h1 and interleaved 1F1B.

Vertical sync: stages hold weight versions by the depth of the first stage, which a search from the last layer to the
first does not know. It is asked for plans whose stages all hold the same number of versions, whatever is in flight, and
what it finds must fit with the versions that the plan really has. With one version each, this is a relaxation, whose
bound holds for all plans.

zb-h1: the cut that is best for 1f1b-flush, with the time of zb-h1's own streams.

Interleaved: the search's best shapes, compared by simulation.
"""

from __future__ import annotations

from dataclasses import replace

from planner.cost.layer_costs import LayerCosts
from planner.cost.network.placement import places_matter
from planner.cost.overheads import stage_memory
from planner.errors import InfeasibleError, InputError
from planner.options.solving import DepthRule, RecomputeRule
from planner.schedule.versions import Entry, versions_held
from planner.solver.choose.first_plans import FirstPlans
from planner.solver.evaluate.evaluation import fastest, priced, simulated
from planner.solver.problem.bounds import balanced_s
from planner.solver.problem.infeasible import Fits, UnexplainedError, explain
from planner.solver.problem.problem import Answer, Problem
from planner.solver.problem.result import Evaluation, Found, stages_along
from planner.solver.problem.states import Chain
from planner.solver.search.chain.interleaved import InterleavedSearch


def solve_zero_bubble(problem: Problem, answer: Answer) -> Found:
    """Under zb-h1, evaluate the stages of the best plan for 1f1b-flush, and bound what no plan can beat.

    How much of the bubble the weights' gradients fill depends on all stages together, which no walk along the layers
    can add up. A good cut does the same under both schedules: no stage has more work than the others.
    """
    if (other := problem.schedule.solved_as) is problem.schedule:
        return answer(problem)
    problem.budget.seen.clear()  # the same stages are other plans under another schedule
    flush = answer(problem.with_schedule(other))
    assert problem.schedule.divides
    best = simulated(problem, priced(problem, flush.best.stages))
    found = replace(flush, bound_s=balanced_s(problem.layer_costs, problem.setting)).with_best(best)
    return FirstPlans(problem).at_least(found)


def solve_interleaved(problem: Problem) -> Found:
    """Find the best interleaved plan along the profile's order.

    Raises:
        InputError: if there are too few GPUs, layers or microbatches to interleave anything.
        InfeasibleError: if no plan fits the memory.
    """
    space, setting, limits = Chain(problem.layer_costs), problem.setting, problem.limits

    def fitting(recompute: RecomputeRule) -> Fits:
        def fits(gpus: int, memory_bytes: int) -> Evaluation | None:
            rules = replace(limits.rules, recompute=recompute)
            other = replace(limits, gpus=gpus, memory_bytes=memory_bytes, rules=rules)
            paths, _ = InterleavedSearch(space, setting, other).best()
            return priced(problem, stages_along(space, paths[0])) if paths else None

        return fits

    search = InterleavedSearch(space, setting, limits)
    if not search.shapes():
        raise InputError(
            f"nothing can be interleaved with {limits.gpus} GPUs, {len(space) - 1} places to end a stage and "
            f"{setting.microbatches} microbatches",
            hint=f"it takes 2 GPUs, {2 * setting.chunks} such places for {setting.chunks} chunks each, and "
            "2 microbatches",
        )
    paths, bound_s = search.best()
    if not paths:
        others = {"`recompute=auto`": fitting("auto")} if limits.recompute == "never" else {}
        raise UnexplainedError(lambda: explain(problem, fitting(limits.recompute), others))
    if places_matter(problem.cluster):
        # With all links as near as the nearest no plan takes longer, so its bound holds, and the cuts suit plans whose
        # pipelines stay within servers.
        near_paths, bound_s = InterleavedSearch(space, setting, limits, problem.topology.link(0)).best()
        paths = list({(path.states, path.options): path for path in [*paths, *near_paths]}.values())
    best = fastest(problem, (priced(problem, stages_along(space, path)) for path in paths))
    return Found(best, min(bound_s, best.seconds))


def solve_synced(problem: Problem, answer: Answer) -> Found:
    """Find the best plan whose versions under vertical sync fit the memory, where it is asked for.

    Raises:
        InfeasibleError: if there is none.
    """
    if not problem.vertical_sync:
        return answer(problem)

    def holding(versions: int, depth: DepthRule) -> Found:
        problem.budget.seen.clear()  # the same stages are other plans with other versions
        layer_costs = problem.layer_costs.holding(versions)
        found = answer(replace(problem, layer_costs=layer_costs, depth=depth))
        return replace(found, best=synced(problem.layer_costs, found.best))

    relaxed = holding(1, problem.depth)
    if relaxed.best.fits(problem.cluster):
        return relaxed
    depths: list[DepthRule] = ["auto", "published"] if problem.depth == "auto" else [problem.depth]
    # Deeper pipelines hold more versions, so the published depths may fit where chosen ones do not.
    for depth in depths:
        for versions in range(2, problem.cluster.gpus + 2):
            try:
                found = holding(versions, depth)
            except InfeasibleError:
                break
            if found.best.fits(problem.cluster):
                return replace(found, bound_s=min(relaxed.bound_s, found.bound_s))
    raise InfeasibleError(
        f"no plan found on {problem.cluster.gpus} GPUs holds the versions of its weights that vertical sync needs",
        hint="leave `vertical_sync` out, or take `schedule=2bw`, which holds two",
    )


def synced(layer_costs: LayerCosts, plan: Evaluation) -> Evaluation:
    """Return the plan with the memory of vertical sync's versions."""
    entry = Entry(plan.stages[0].replicas, plan.price.in_flight[0])
    memory = tuple(
        stage_memory(layer_costs.footprint(stage), flying, versions_held(entry, stage.replicas))
        for stage, flying in zip(plan.stages, plan.price.in_flight, strict=True)
    )
    return replace(plan, price=replace(plan.price, memory=memory))
