"""The methods that find a plan, and the one that a problem needs.

search   exact; GPUs alike. Also good plans for GPUs that differ, on any levels
ilp      an integer program: GPUs that differ, too; clusters of one level

A model of repeated blocks is cut between its blocks first, and inside blocks where that pays.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.cost.network.topology import places_matter
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.options.solving import RecomputeRule
from planner.plan.blocks import block_ends
from planner.solver.choose.first_plans import FirstPlans, fitting_plans
from planner.solver.choose.improvement import deepened, fastest_simulated, improved
from planner.solver.evaluate.evaluation import fastest, priced
from planner.solver.mixed import solve_mixed
from planner.solver.problem.budget import LATER, OutOfTimeError, no_plan_yet
from planner.solver.problem.drained import with_single_stages
from planner.solver.problem.infeasible import Fits, UnexplainedError, explain
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation, Found, stages_along
from planner.solver.problem.states import Chain
from planner.solver.search.chain.interleaved import InterleavedSearch
from planner.solver.search.integer.ilp import needs_program, solve_by_program
from planner.solver.search.pipeline_search import PipelineSearch

PAYS = 0.02  # share of the time that cuts inside blocks must save
BETWEEN = "cuts between blocks"  # what the bound of a search over blocks holds for
PRECISION = 2e-3  # of searches over blocks: less than timings vary
# Cuts up to which a search looks inside blocks. It takes longer under synchronous schedules, and where the memory is
# limited: then every stage may recompute any of its blocks.
MOST_CUTS, MOST_LIMITED_CUTS = 400, 160


def solve_blocks_first(problem: Problem, answer: Callable[[Problem], Found]) -> Found:
    """Find the best plan of the search `answer` that cuts at blocks' boundaries, or inside blocks where that pays.

    Inside blocks it is sought among all cuts if those are few, and otherwise beside the cuts that were found. Raise
    InputError for blocks of a model that has none.
    """
    profile = problem.layer_costs.profile
    ends = frozenset[int]() if problem.rules.granularity == "layer" else block_ends(profile)
    if not ends and problem.rules.granularity == "block":
        without = f"`granularity=block` is for models of repeated blocks, and '{profile.model}' has none"
        raise InputError(without, hint="use `granularity=layer`")
    if not ends:
        return answer(problem)
    blocks = cut_after(problem, ends)
    if problem.rules.granularity == "block":
        return answer(blocks)
    layers, many = len(profile.layers), problem.schedule.asynchronous and problem.cluster.memory_bytes is None
    most = MOST_CUTS if many else MOST_LIMITED_CUTS
    try:
        best = found = answer(blocks)
    except InfeasibleError:
        if layers > most:
            raise
        return answer(problem)  # smaller stages may fit
    bound_s, bound_of = PipelineSearch(problem).relaxed_s(), ""  # over cuts inside blocks, too
    pays, everywhere = bound_s < found.best.seconds * (1 - PAYS), layers <= most and not problem.deadline.passed
    if pays and not problem.deadline.passed:
        cuts = frozenset(range(layers - 1)) if everywhere else ends | _beside(problem, ends, found.best)
        if cuts != ends and len(cuts) <= most:
            inside = answer(problem if everywhere else cut_after(problem, cuts))
            bound_s = inside.bound_s if everywhere else bound_s
            best = inside if inside.best.saves(found.best, PAYS) else found
    # Of plans that cut between blocks a search knows well how little the memory leaves to recompute.
    if pays and not (everywhere or problem.schedule.asynchronous) and best is found and found.bound_s > bound_s:
        bound_s, bound_of = found.bound_s, BETWEEN
    return replace(best, bound_s=min(bound_s, best.best.seconds), bound_of=bound_of)


def _beside(problem: Problem, ends: frozenset[int], plan: Evaluation) -> frozenset[int]:
    """Return the cuts inside the blocks on either side of each of the plan's cuts."""
    cuts = {len(stage.before) - 1 for stage in plan.stages[1:]}
    starts = sorted({-1, *ends, len(problem.layer_costs.profile.layers) - 1})
    places = [starts.index(cut) for cut in cuts & ends]
    return frozenset(cut for place in places for cut in range(starts[place - 1] + 1, starts[place + 1]))


def cut_after(problem: Problem, ends: frozenset[int]) -> Problem:
    """Return the problem with cuts after these layers only, where the profile allows them."""
    profile = problem.layer_costs.profile
    forbidden = {layer.name for number, layer in enumerate(profile.layers) if number not in ends}
    names = tuple(layer.name for layer in profile.layers[:-1] if layer.name in forbidden | {*profile.no_cut_after})
    return replace(problem.with_profile(profile.model_copy(update={"no_cut_after": names})), precision=PRECISION)


MOST_COLUMNS = 40_000  # about: of an integer program that is tried beside a search


def solve_by_method(problem: Problem) -> Found:
    """Find the best plan by the method that the problem needs; raise InfeasibleError if no plan fits the memory.

    Raise PlannerError if the deadline passes before any plan is found.
    """
    unlike = problem.cluster.kinds and not problem.schedule.chunked
    if unlike and problem.solver in ("auto", "search"):
        return _on_mixed_gpus(problem)
    if needs_program(problem, problem.solver):
        return solve_by_program(problem)
    return solve_blocks_first(problem, solve_interleaved if problem.schedule.chunked else searched)


def searched(problem: Problem) -> Found:
    """Find the best plan with one stage per worker, no slower than those that take no search."""
    first = FirstPlans(problem)
    if problem.deadline.at_s is not None:
        first.evaluate()
    try:
        found = _by_search(problem)
    except OutOfTimeError:
        if first.best is None or not problem.deadline.passed:
            first.evaluate()
        last_resort = first.last_resort()
        if last_resort is None:
            raise no_plan_yet(problem.deadline) from None
        problem.budget.exhausted = False
        found = Found(last_resort, PipelineSearch(problem).relaxed_s())
    except InfeasibleError:
        first.evaluate()  # these have stages that the search does not
        if first.best is None:
            raise
        found = Found(first.best, PipelineSearch(problem).relaxed_s())
    found = first.at_least(found)
    if max(problem.levels) > 1 and not problem.cluster.kinds:  # the search has none of these
        found = replace(found, bound_s=with_single_stages(problem, found.bound_s))
    if found.bound_s >= problem.hopeless_s:
        return found
    return least_late(problem, deepened(problem, improved(problem, found)))


def least_late(problem: Problem, found: Found) -> Found:
    """Return the answer with the plan whose gradients are least late among those simulated that are nearly as fast."""
    if not problem.schedule.stashes or not found.best.simulated:
        return found
    near = [plan for plan in problem.budget.seen.values() if plan.seconds < found.best.seconds * LATER]
    plans = [found.best, *filter(problem.allows, near)]
    return found.with_best(min(plans, key=lambda plan: (max(plan.price.in_flight), plan.seconds)))


def _by_search(problem: Problem) -> Found:
    """Search for the best plan: by the cost model first, then by simulation."""
    search = PipelineSearch(problem)

    def fits(gpus: int, memory_bytes: int) -> Evaluation | None:
        found = search.fits(gpus, memory_bytes)
        if found is None and gpus == problem.cluster.gpus and max(problem.levels) > 1:  # which the search has not
            rules = replace(problem.rules, max_stages=1)
            whole = replace(problem.with_cluster(problem.cluster.with_memory(lambda _: memory_bytes)), rules=rules)
            found = next(fitting_plans(whole), None)
        return found

    path = search.best()
    if path is None:
        raise UnexplainedError(lambda: explain(problem, fits, search.leaner()))
    bounded = search.bounded(path)
    assert bounded.path is not None
    best = search.priced(bounded.path)
    # The bound comes from the search and the seconds from the price, which add the same numbers in another order.
    bound_s = min(bounded.bound_s, best.seconds)
    columned = search.columned(path, best)
    bound_s = min(bound_s, columned.bound_s)
    return Found(fastest_simulated(search, [best, *columned.plans], bound_s), bound_s)


def _on_mixed_gpus(problem: Problem) -> Found:
    """Find the best plan on GPUs of several kinds by the search, and by the integer program where that is quick."""
    cluster = problem.cluster
    columns = len(problem.layer_costs.profile.layers) ** 2 * cluster.gpus * 2 ** len(cluster.kinds)
    exact = problem.solver == "auto" and len(cluster.joined) == 1 and columns <= MOST_COLUMNS
    try:
        found = solve_blocks_first(problem, lambda each: least_late(each, FirstPlans(each).at_least(solve_mixed(each))))
    except (InfeasibleError, InputError):
        if not exact:
            raise
        return solve_by_program(problem)
    if not exact:
        return found
    try:
        other = solve_by_program(problem)
    except PlannerError:  # too many stages for a program, or too little time
        return found
    best = other if other.best.saves(found.best) else found
    return replace(best, bound_s=max(found.bound_s, other.bound_s))


def solve_interleaved(problem: Problem) -> Found:
    """Find the best interleaved plan along the profile's order."""
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
        others = {"`recompute=auto`": fitting("auto")} if limits.rules.recompute == "never" else {}
        raise UnexplainedError(lambda: explain(problem, fitting(limits.rules.recompute), others))
    if places_matter(problem.cluster):
        # With all links as near as the nearest no plan takes longer, so its bound holds, and the cuts suit plans whose
        # pipelines stay within servers.
        near_paths, bound_s = InterleavedSearch(space, setting, limits, problem.topology.link(0)).best()
        paths = list({(path.states, path.options): path for path in [*paths, *near_paths]}.values())
    best = fastest(problem, (priced(problem, stages_along(space, path)) for path in paths))
    return Found(best, min(bound_s, best.seconds))
