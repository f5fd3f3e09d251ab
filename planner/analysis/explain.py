"""Explain a plan: what limits it, how much slack the rest has, and what a larger cluster would
give.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from planner.analysis.given_plan import GivenPlan
from planner.arguments import checked
from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster
from planner.formats.files import Record, replace
from planner.formats.names import CODECS
from planner.formats.plan import Plan
from planner.formats.plan_parts import Bottleneck, SolverReport
from planner.formats.profile import Profile
from planner.formats.shown import Shown
from planner.options.solving import TIME_LIMIT_S
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import summarize
from planner.solver.clock import Clock
from planner.solver.find_plan import find_plan
from planner.solver.request import Request, options_asked
from planner.solver.tuning.answers import WhatIfTuning

_SAME = 1e-6  # relative difference of times that is rounding


class ResourceUse(Record):
    """Busy time of one resource of a stage, in the plan's simulation; of the replica where that is
    longest.

    Where the cost model predicts the plan, the busy times are its terms.
    """

    stage: int | None  # None for a link that several workers share, which `resource` names
    resource: str
    busy_s: float  # per minibatch
    share: float  # of the time per minibatch; the rest is slack


class Alternative(Record):
    """The plan for another cluster."""

    what: str
    config: str | None  # None if no plan fits
    seconds_per_minibatch: float | None
    gain: float | None  # 0.05 is 5% more samples per second than the plan
    out_of_time: bool = False  # the time limit ended its search: it may gain more


class Explanation(Shown, Record):
    """What limits a plan and what could be better. `waiting_s`: simulated time beyond the busiest
    resource.
    """

    model: str
    config: str
    cluster: Cluster
    seconds_per_minibatch: float
    samples_per_update: tuple[int, int]  # as a plan has it
    microbatch_size: int | None
    bottleneck: Bottleneck
    waiting_s: float
    uses: tuple[ResourceUse, ...]
    what_if: tuple[Alternative, ...]
    solver: SolverReport
    out_of_time: bool = False  # the time limit passed: alternatives were searched for too short


@checked
def explain(profile: Profile, plan: Plan, *, clock: Clock | None = None) -> Explanation:
    """Explain why `plan` is as it is.

    Args:
        profile: that the plan was made from.
        plan: from `solve`.
        clock: how long all searches for other plans may take together.

    Raises:
        PlanError: if the plan was made from another profile.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> why = planner.explain(profile, plan)
        >>> why.bottleneck.stage, why.bottleneck.resource
        (1, 'compute')
    """
    given = GivenPlan.of(profile, plan, clock or Clock.of(TIME_LIMIT_S))
    bottleneck = plan.predicted.bottleneck
    if given.simulated:
        uses = tuple(_simulated_uses(plan))
        bottleneck = _busiest(uses, bottleneck)
    else:
        uses = tuple(_priced_uses(given))
        bottleneck = _priced(uses, bottleneck)

    # Synchronous schedules idle in their bubble anyway, so the difference would not be waiting.
    waiting_s = 0.0
    if plan.schedule.asynchronous:
        waiting_s = max(0.0, given.seconds - bottleneck.busy_s)
    return Explanation(
        model=profile.model,
        config=plan.config,
        cluster=plan.cluster,
        seconds_per_minibatch=given.seconds,
        samples_per_update=plan.samples_per_update,
        microbatch_size=plan.microbatch_size,
        bottleneck=bottleneck,
        waiting_s=waiting_s,
        uses=uses,
        what_if=_what_if(given),
        solver=plan.solver,
        out_of_time=given.request.clock.passed,
    )


def _busiest(uses: Sequence[ResourceUse], priced: Bottleneck) -> Bottleneck:
    """Return the busiest resource of a simulation; of a server's link, with the stage that the cost
    model names.
    """
    busiest = max(uses, key=lambda use: round(use.share, 6))  # of equal ones the first
    if busiest.stage is None:
        return Bottleneck(stage=priced.stage, resource="shared_link", busy_s=busiest.busy_s)

    resource: Literal["compute", "link"] = "compute" if busiest.resource == "compute" else "link"
    return Bottleneck(stage=busiest.stage, resource=resource, busy_s=busiest.busy_s)


def _priced(uses: Sequence[ResourceUse], bottleneck: Bottleneck) -> Bottleneck:
    """Return the cost model's bottleneck with its busy time among the uses."""
    kinds = {"link": ("send", "receive")}.get(bottleneck.resource, (bottleneck.resource,))
    limiting = [
        use.busy_s for use in uses if use.stage == bottleneck.stage and use.resource in kinds
    ]
    busy_s = max(limiting, default=bottleneck.busy_s)
    return replace(bottleneck, busy_s=busy_s)


def _simulated_uses(plan: Plan) -> Iterator[ResourceUse]:
    """Yield the busy times in the steady state that `plan simulate` shows."""
    summary = summarize(simulate(plan))
    seconds = plan.predicted.seconds_per_minibatch
    for number in dict.fromkeys(worker.stages[0] for worker in summary.workers):
        workers = [worker for worker in summary.workers if worker.stages[0] == number]
        for name in ("compute", "receive", "send"):
            share = max(getattr(worker, f"{name}_share") for worker in workers)
            yield ResourceUse(stage=number, resource=name, busy_s=share * seconds, share=share)

    for link in summary.shared_links:
        busy_s = link.busy_share * seconds
        yield ResourceUse(stage=None, resource=link.name, busy_s=busy_s, share=link.busy_share)


def _priced_uses(given: GivenPlan) -> Iterator[ResourceUse]:
    for number, resources in enumerate(given.busy_resources()):
        for name, busy_s in resources.items():
            yield ResourceUse(
                stage=number,
                resource=name,
                busy_s=float(busy_s),
                share=float(busy_s) / given.seconds,
            )


def _what_if(given: GivenPlan) -> tuple[Alternative, ...]:
    """Solve again with the same options on slightly larger clusters, and where links limit, with
    smaller messages.
    """
    request = given.request.with_options(options_asked(given.plan))
    clusters = list(_clusters_beside(given.plan, request.tuning.what_if))
    alternatives = []
    for number, (what, cluster) in enumerate(clusters):
        share = 1 / (len(clusters) - number)
        alternatives.append(_alternative(what, given, request.on(cluster).within(share)))

    return tuple(alternatives)


def _clusters_beside(plan: Plan, tuning: WhatIfTuning) -> Iterator[tuple[str, Cluster]]:
    cluster = plan.cluster
    bandwidth = tuning.bandwidth_ratio
    wider = tuple(level.times_as_fast(bandwidth) for level in cluster.levels)
    yield f"{bandwidth - 1:.0%} more bandwidth", replace(cluster, levels=wider)

    yield from _one_more(cluster)

    if cluster.has_memory_limit:
        memory = tuning.memory_ratio
        more = cluster.with_memory(lambda memory_bytes: int(memory_bytes * memory))
        yield f"{memory - 1:.0%} more memory", more

    if plan.predicted.bottleneck.resource != "compute":
        for name in CODECS:
            if name not in ("none", cluster.compress):
                yield f"activations sent as {name}", replace(cluster, compress=name)


def _one_more(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield the cluster with one more member of the outermost level, of each kind where GPUs
    differ.
    """
    *inner, last = cluster.levels
    size = cluster.gpus // last.size
    levels = (*inner, replace(last, size=last.size + 1))
    what = "one more GPU"
    if inner:
        what = f"one more group of {size} GPUs"
    if not cluster.kinds:
        yield what, replace(cluster, levels=levels)
    for number, kind in enumerate(cluster.kinds):
        more = replace(kind, count=kind.count + size)
        kinds = (*cluster.kinds[:number], more, *cluster.kinds[number + 1 :])
        yield f"{what} of {kind.title}", replace(cluster, levels=levels, kinds=kinds)


def _alternative(what: str, given: GivenPlan, request: Request) -> Alternative:
    """Return the fastest plan for another cluster, or the given plan, which runs there, too."""
    try:
        plan = _worth_its_staleness(find_plan(request), given, request)
    except InfeasibleError:
        return Alternative(what=what, config=None, seconds_per_minibatch=None, gain=None)

    config = plan.config
    seconds = _comparable_s(plan, given)
    if seconds > given.seconds:
        config = given.plan.config
        seconds = given.seconds

    gain = given.seconds / seconds - 1
    return Alternative(
        what=what,
        config=config,
        seconds_per_minibatch=seconds,
        gain=0.0 if abs(gain) < _SAME else gain,
        out_of_time=request.clock.passed,
    )


def _worth_its_staleness(plan: Plan, given: GivenPlan, request: Request) -> Plan:
    """Return the plan, or the best without stale gradients, as `solve` chooses between the two.

    Otherwise a pipeline that was left out for its staleness would seem to be what more bandwidth
    gains.
    """
    if not plan.staleness or given.plan.staleness:
        return plan

    current = find_plan(request.with_options(request.options.changed(max_staleness=0)))
    speedup = _comparable_s(current, given) / _comparable_s(plan, given)
    if speedup >= request.tuning.evaluate.min_speedup_per_stale_update:
        return plan
    return current


def _comparable_s(plan: Plan, given: GivenPlan) -> float:
    """Return a plan's seconds; by the cost model, which all plans have, where only one of the two
    is simulated.
    """
    seconds = plan.predicted.seconds_per_minibatch
    if (plan.predicted.by == "simulation") == given.simulated:
        return seconds

    given_s = given.plan.solver.cost_model_s or given.seconds
    return (plan.solver.cost_model_s or seconds) / given_s * given.seconds
