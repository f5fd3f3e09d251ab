"""Explain a plan: what limits it, how much slack the rest has, and what other cuts or a larger cluster would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from planner.analysis.compare import STRAIGHT
from planner.analysis.given_plan import GivenPlan, fastest
from planner.analysis.sweep import at_bandwidth
from planner.arguments import checked
from planner.cost.candidate import Candidate
from planner.cost.setting import Setting
from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster
from planner.formats.files import Record
from planner.formats.names import CODECS
from planner.formats.plan import Plan
from planner.formats.plan_parts import Bottleneck, SolverReport, config_of
from planner.formats.profile import Profile
from planner.formats.shown import Shown
from planner.options.solving import SolveOptions
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import summarize
from planner.solver.choose import baselines
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import Budget, Patience
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import Chain
from planner.solver.search.restricted import counts_to_try, proposals

MORE_BANDWIDTH = 1.1
MORE_MEMORY = 1.5
MOVING, LOOKING = 0.2, 0.3  # shares of the time left for moves, then for other configs; the rest is for other clusters
_SAME = 1e-6  # relative difference of times that counts as none


class ResourceUse(Record):
    """Busy time of one resource of a stage, in the plan's simulation; of the replica where that is longest.

    Under `interleaved` it is of the worker that has the stage first. Where the cost model predicts the plan, the busy
    times are its terms.
    """

    stage: int | None  # None for a link that several workers share, which `resource` names
    resource: str
    busy_s: float  # per minibatch
    share: float  # of the time per minibatch; the rest is slack


class MemoryUse(Record):
    """What one replica of a stage holds."""

    stage: int
    bytes: int
    slack_bytes: int | None  # None without a limit
    overhead_bytes: int = 0  # of `bytes`: a CUDA context, communicators, fragmentation


class BoundaryMove(Record):
    """A boundary moved to the next legal cut, and how much slower the plan becomes."""

    boundary: int  # after this stage
    layer: str  # that changes stages
    to_stage: int
    seconds_per_minibatch: float
    slower: float  # 0.05 is 5% more time
    fits: bool


class Alternative(Record):
    """Another plan, or the plan for another cluster."""

    what: str
    config: str | None  # None if no plan fits
    seconds_per_minibatch: float | None
    gain: float | None  # 0.05 is 5% more samples per second than the plan


class Explanation(Shown, Record):
    """What limits a plan and what could be better. `waiting_s`: simulated time beyond the busiest resource."""

    model: str
    config: str
    cluster: Cluster
    seconds_per_minibatch: float
    bottleneck: Bottleneck
    waiting_s: float
    uses: tuple[ResourceUse, ...]
    memory: tuple[MemoryUse, ...]
    moves: tuple[BoundaryMove, ...]
    next_best: Alternative | None
    what_if: tuple[Alternative, ...]
    solver: SolverReport
    out_of_time: bool = False  # the time limit passed: moves are missing, or alternatives were searched for too short


@checked
def explain(
    profile: Profile, plan: Plan, *, options: SolveOptions | None = None, patience: Patience | None = None
) -> Explanation:
    """Explain why `plan` is as it is.

    Args:
        profile: that the plan was made from.
        plan: from `solve`.
        options: how the plan was solved, where the plan does not record it; by default as `solve` does.
        patience: how long all searches for other plans may take together.

    Raises:
        PlanError: if the plan was made from another profile.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> why = planner.explain(profile, plan)
        >>> why.bottleneck.stage, why.bottleneck.resource
        (1, 'compute')
    """
    given, bottleneck = GivenPlan.of(profile, plan, options, patience), plan.predicted.bottleneck
    uses = tuple(_simulated_uses(plan) if given.simulated else _priced_uses(given))
    kinds = {"link": ("send", "receive"), "boundary": ("cut_after",)}.get(bottleneck.resource, (bottleneck.resource,))
    limiting = [use.busy_s for use in uses if use.stage == bottleneck.stage and use.resource in kinds]
    if limiting:
        bottleneck = bottleneck.model_copy(update={"busy_s": max(limiting)})
    return Explanation(
        model=profile.model,
        config=plan.config,
        cluster=plan.cluster,
        seconds_per_minibatch=given.seconds,
        bottleneck=bottleneck,
        # Synchronous schedules idle in their bubble anyway, so the difference would not be waiting.
        waiting_s=max(0.0, given.seconds - bottleneck.busy_s) if plan.schedule.asynchronous else 0.0,
        uses=uses,
        memory=tuple(_memory(plan, number) for number in range(len(plan.stages))),
        moves=_moves(given.within(MOVING)),
        next_best=_next_best(given.within(LOOKING)),
        what_if=_what_if(given),
        solver=plan.solver,
        out_of_time=given.patience.deadline.passed,
    )


def _simulated_uses(plan: Plan) -> Iterator[ResourceUse]:
    """Yield the busy times in the steady state that `plan simulate` shows."""
    summary, seconds = summarize(simulate(plan)), plan.predicted.seconds_per_minibatch
    for number in dict.fromkeys(worker.stages[0] for worker in summary.workers):
        workers = [worker for worker in summary.workers if worker.stages[0] == number]
        for name in ("compute", "receive", "send"):
            share = max(getattr(worker, f"{name}_share") for worker in workers)
            yield ResourceUse(stage=number, resource=name, busy_s=share * seconds, share=share)
    for link in summary.shared_links:
        busy_s = link.busy_share * seconds
        yield ResourceUse(stage=None, resource=link.name, busy_s=busy_s, share=link.busy_share)


def _priced_uses(given: GivenPlan) -> Iterator[ResourceUse]:
    """Yield the terms of the cost model."""
    for number, resources in enumerate(given.busy_resources()):
        for name, busy_s in resources.items():
            yield ResourceUse(stage=number, resource=name, busy_s=float(busy_s), share=float(busy_s) / given.seconds)


def _memory(plan: Plan, stage: int) -> MemoryUse:
    held, limit = plan.memory_bytes(stage), plan.cluster.memory_on(plan.stages[stage].ranks)
    slack = None if limit is None else limit - held
    return MemoryUse(stage=stage, bytes=held, slack_bytes=slack, overhead_bytes=held - plan.tensor_bytes(stage))


def _moves(given: GivenPlan) -> tuple[BoundaryMove, ...]:
    """Move each boundary to the next legal cut on either side.

    Empty for stages that are not runs of the profile's order, and under `interleaved`, whose boundaries join more than
    two workers.
    """
    if given.plan.schedule.chunked:
        return ()
    ends = [0]
    for stage in given.stages:
        ends.append(ends[-1] + len(stage.layers))
        if stage.layers != frozenset(range(ends[-2], ends[-1])):
            return ()
    legal = baselines.legal_ends(given.layer_costs)
    found = list[BoundaryMove | None]()
    for boundary in range(1, len(ends) - 1):
        place = legal.index(ends[boundary])
        for step in (-1, 1):
            moved = [*ends[:boundary], legal[place + step], *ends[boundary + 1 :]]
            if len(set(moved)) == len(moved) == len(ends) and moved == sorted(moved):
                found.append(_move(given, boundary - 1, moved, step))
    return tuple(move for move in found if move is not None)


def _move(given: GivenPlan, boundary: int, ends: list[int], step: int) -> BoundaryMove | None:
    stages = []
    for stage, (first, end) in zip(given.stages, pairwise(ends), strict=True):
        layers = frozenset(range(first, end))
        # Layers that recompute do so on either side of the boundary, in the part of their group that is there.
        groups = tuple(group & layers for own in given.stages for group in own.options.recompute if group & layers)
        options = replace(stage.options, recompute=groups)
        stages.append(replace(stage, before=frozenset(range(first)), layers=layers, options=options))
    plan = evaluate(given.problem, stages)
    if plan.simulated != given.simulated:
        return None  # too little time to compare like with like
    position = ends[boundary + 1] if step < 0 else ends[boundary + 1] - 1
    return BoundaryMove(
        boundary=boundary,
        layer=given.layer_costs.profile.layers[position].name,
        to_stage=boundary + (step < 0),
        seconds_per_minibatch=plan.seconds,
        slower=plan.seconds / given.seconds - 1,
        fits=plan.fits(given.plan.cluster),
    )


def _next_best(given: GivenPlan) -> Alternative | None:
    """Find the fastest plan with another config that fits, among the search's proposals and the baselines."""
    if given.plan.schedule.chunked:
        return None  # none of those has chunks
    layer_costs, cluster, deadline = given.layer_costs, given.plan.cluster, given.patience.deadline
    # Proposals are those of 1f1b, whose search is the quickest; each is evaluated under the plan's own schedule.
    proposing = Problem(layer_costs, Setting(cluster), given.options.rules, budget=Budget(deadline))
    found: list[Sequence[Candidate]] = [
        *(baselines.data_parallel(layer_costs, count) for count in counts_to_try(cluster.gpus)),
        *baselines.straight(layer_costs, cluster, deadline.earlier(STRAIGHT)),
        baselines.equal_time(layer_costs, cluster.gpus),
        *proposals(proposing, Chain(layer_costs)),
    ]
    others = [stages for stages in dict.fromkeys(map(tuple, found)) if _config(stages) != given.plan.config]
    best = fastest(given.problem, others, must_fit=True)
    if best is None or best.simulated != given.simulated:
        return None
    return _alternative(given, "the best other config", _config(best.stages), best.seconds)


def _config(stages: Sequence[Candidate]) -> str:
    return config_of(tuple(stage.replicas for stage in stages))


def _what_if(given: GivenPlan) -> tuple[Alternative, ...]:
    """Solve again with the same options on slightly larger clusters, and where links limit, with smaller messages."""
    cluster = given.plan.cluster
    levels = cluster.levels
    wider = tuple(at_bandwidth(level, level.bandwidth_bytes_per_s * MORE_BANDWIDTH) for level in levels)
    clusters = [
        (f"{MORE_BANDWIDTH - 1:.0%} more bandwidth", cluster.model_copy(update={"levels": wider})),
        *_one_more(cluster),
    ]
    if cluster.has_memory_limit:
        more = cluster.with_memory(lambda memory_bytes: int(memory_bytes * MORE_MEMORY))
        clusters.append((f"{MORE_MEMORY - 1:.0%} more memory", more))
    if given.plan.predicted.bottleneck.resource != "compute":
        names = [name for name in CODECS if name not in ("none", cluster.compress)]
        clusters += [(f"activations sent as {each}", cluster.model_copy(update={"compress": each})) for each in names]
    return tuple(
        _resolved(given.within(1 / (len(clusters) - number)), what, larger)
        for number, (what, larger) in enumerate(clusters)
    )


def _one_more(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield the cluster with one more member of the outermost level, of each kind where GPUs differ."""
    *inner, last = cluster.levels
    size = cluster.gpus // last.size
    larger = {"levels": (*inner, last.model_copy(update={"size": last.size + 1}))}
    what = f"one more group of {size} GPUs" if inner else "one more GPU"
    if not cluster.kinds:
        yield what, cluster.model_copy(update=larger)
    for number, kind in enumerate(cluster.kinds):
        more = kind.model_copy(update={"count": kind.count + size})
        kinds = (*cluster.kinds[:number], more, *cluster.kinds[number + 1 :])
        yield f"{what} of {kind.title}", cluster.model_copy(update=larger | {"kinds": kinds})


def _resolved(given: GivenPlan, what: str, cluster: Cluster) -> Alternative:
    try:
        plan = find_plan(given.layer_costs.profile, cluster, given.options, given.patience)
    except InfeasibleError:
        return Alternative(what=what, config=None, seconds_per_minibatch=None, gain=None)
    config, seconds = plan.config, plan.predicted.seconds_per_minibatch
    if (plan.predicted.by == "simulation") != given.simulated:  # then both by the cost model, which all have
        known = given.plan.solver.cost_model_s or given.seconds
        seconds = (plan.solver.cost_model_s or seconds) / known * given.seconds
    elif cluster.gpus == given.plan.cluster.gpus:
        # The given plan runs there, too, and can win: the search stops within a tolerance of its bound.
        own = evaluate(given.problem_on(cluster), given.stages)
        if own.simulated == given.simulated and own.seconds < seconds:
            config, seconds = given.plan.config, own.seconds
    if seconds > given.seconds:  # too little time to search: the given plan runs there, too
        config, seconds = given.plan.config, given.seconds
    return _alternative(given, what, config, seconds)


def _alternative(given: GivenPlan, what: str, config: str, seconds: float) -> Alternative:
    gain = given.seconds / seconds - 1
    return Alternative(what=what, config=config, seconds_per_minibatch=seconds, gain=0.0 if abs(gain) < _SAME else gain)
