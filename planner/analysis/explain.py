"""Why a plan is as it is: what limits it, what is left over, and what other cuts or a larger cluster would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.analysis.question import Question, question_of, stages_of
from planner.cost.asynchronous import ASYNCHRONOUS
from planner.cost.layer_costs import Candidate, Ledger
from planner.cost.pricing import busy_resources
from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster, Level
from planner.formats.files import Record
from planner.formats.plan import Bottleneck, Plan, SolverReport, config_of
from planner.formats.profile import Profile
from planner.solver.candidates.waits import counts_to_try, proposals
from planner.solver.chain.states import Chain
from planner.solver.reference import baselines

MORE = 1.1  # of bandwidth
MORE_MEMORY = 1.5
_SAME = 1e-6  # relative difference of times that counts as none


class Use(Record):
    """What one resource of a stage does per minibatch; under `interleaved` of the worker that has the stage first."""

    stage: int
    resource: str
    busy_s: float
    share: float  # of the time per minibatch; the slack is the rest


class MemoryUse(Record):
    """What one replica of a stage holds."""

    stage: int
    bytes: int
    slack_bytes: int | None  # None without a limit


class Move(Record):
    """A boundary moved by one legal cut: how much slower the plan is then."""

    boundary: int  # after this stage
    layer: str  # that changes stages
    to_stage: int
    seconds_per_minibatch: float
    slower: float  # 0.05 is 5% more time
    fits: bool


class Alternative(Record):
    """Another plan, or another cluster's plan."""

    what: str
    config: str | None  # None where no plan fits
    seconds_per_minibatch: float | None
    gain: float | None  # 0.05 is 5% more samples per second than the plan


class Explanation(Record):
    """All of it. `waiting_s` is what the simulated schedule takes beyond the busiest resource."""

    model: str
    config: str
    cluster: Cluster
    seconds_per_minibatch: float
    bottleneck: Bottleneck
    waiting_s: float
    uses: tuple[Use, ...]
    memory: tuple[MemoryUse, ...]
    moves: tuple[Move, ...]
    next_best: Alternative | None
    what_if: tuple[Alternative, ...]
    solver: SolverReport


@dataclass(frozen=True)
class _Case:
    """A plan and what it answers."""

    ledger: Ledger
    plan: Plan
    stages: Sequence[Candidate]
    question: Question

    @property
    def seconds(self) -> float:
        return self.plan.predicted.seconds_per_minibatch


def explain(profile: Profile, plan: Plan, *, question: Question | None = None) -> Explanation:
    """Why `plan` is as it is.

    Args:
        profile: that the plan was made from.
        plan: from `solve`.
        question: how it was solved, for what the plan itself does not say; the default is `solve`'s.

    Raises:
        PlanError: when the plan was made from another profile.
    """
    ledger = Ledger(profile)
    case = _Case(ledger, plan, stages_of(ledger, plan), question or question_of(plan))
    predicted = plan.predicted
    return Explanation(
        model=profile.model,
        config=plan.config,
        cluster=plan.cluster,
        seconds_per_minibatch=case.seconds,
        bottleneck=predicted.bottleneck,
        waiting_s=_waiting_s(case),
        uses=_uses(case),
        memory=_memory(plan),
        moves=_moves(case),
        next_best=_next_best(case),
        what_if=_what_if(case),
        solver=plan.solver,
    )


def _waiting_s(case: _Case) -> float:
    """Only of schedules whose pace is their busiest resource; the others' idle time is their bubble."""
    if case.plan.schedule not in ASYNCHRONOUS:
        return 0.0
    return max(0.0, case.seconds - case.plan.predicted.bottleneck.busy_s)


def _uses(case: _Case) -> tuple[Use, ...]:
    plan = case.plan
    busy = busy_resources(
        case.ledger,
        case.stages,
        plan.cluster,
        model=plan.solver.cost_model,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
    )
    return tuple(
        Use(stage=number, resource=name, busy_s=float(busy_s), share=float(busy_s) / case.seconds)
        for number, resources in enumerate(busy)
        for name, busy_s in resources.items()
    )


def _memory(plan: Plan) -> tuple[MemoryUse, ...]:
    limit = plan.cluster.memory_bytes
    return tuple(
        MemoryUse(
            stage=number,
            bytes=plan.memory_bytes(number),
            slack_bytes=None if limit is None else limit - plan.memory_bytes(number),
        )
        for number in range(len(plan.stages))
    )


def _moves(case: _Case) -> tuple[Move, ...]:
    """Each boundary moved to the next legal cut on either side; none for plans that do not follow the order.

    None under `interleaved` either, where a boundary is not between two workers alone.
    """
    if case.plan.schedule == "interleaved":
        return ()
    ends = [0]
    for stage in case.stages:
        ends.append(ends[-1] + len(stage.layers))
        if stage.layers != frozenset(range(ends[-2], ends[-1])):
            return ()
    legal = baselines.legal_ends(case.ledger)
    found = []
    for boundary in range(1, len(ends) - 1):
        place = legal.index(ends[boundary])
        for step in (-1, 1):
            moved = [*ends[:boundary], legal[place + step], *ends[boundary + 1 :]]
            if len(set(moved)) == len(moved) == len(ends) and moved == sorted(moved):
                found.append(_move(case, boundary - 1, moved, step))
    return tuple(found)


def _move(case: _Case, boundary: int, ends: list[int], step: int) -> Move:
    stages = []
    for stage, first, end in zip(case.stages, ends, ends[1:], strict=False):
        layers = frozenset(range(first, end))
        stages.append(Candidate(frozenset(range(first)), layers, stage.replicas, stage.recompute))
    cost = case.question.price(case.ledger, stages, case.plan.cluster)
    limit = case.plan.cluster.memory_bytes
    position = ends[boundary + 1] if step < 0 else ends[boundary + 1] - 1
    return Move(
        boundary=boundary,
        layer=case.ledger.profile.layers[position].name,
        to_stage=boundary + (step < 0),
        seconds_per_minibatch=cost.seconds_per_minibatch,
        slower=cost.seconds_per_minibatch / case.seconds - 1,
        fits=limit is None or all(memory.total_bytes <= limit for memory in cost.memory),
    )


def _next_best(case: _Case) -> Alternative | None:
    """The fastest of the searches' and the hand-made plans that has another config and fits."""
    if case.plan.schedule == "interleaved":
        return None  # none of those has chunks
    limit = case.plan.cluster.memory_bytes
    best: tuple[float, str] | None = None
    for least_s, stages in case.question.by_formula(case.ledger, _others(case), case.plan.cluster):
        config = config_of(tuple(stage.replicas for stage in stages))
        if config == case.plan.config:
            continue
        if best is not None and least_s >= best[0]:
            break
        cost = case.question.price(case.ledger, stages, case.plan.cluster)
        if limit is not None and any(memory.total_bytes > limit for memory in cost.memory):
            continue
        if best is None or cost.seconds_per_minibatch < best[0]:
            best = cost.seconds_per_minibatch, config
    return None if best is None else _alternative(case, "the best other config", best[1], best[0])


def _others(case: _Case) -> list[Sequence[Candidate]]:
    cluster = case.plan.cluster
    found: list[Sequence[Candidate]] = [
        baselines.data_parallel(case.ledger, count) for count in counts_to_try(cluster.gpus)
    ]
    found += [*baselines.straight(case.ledger, cluster), baselines.equal_time(case.ledger, cluster.gpus)]
    found += proposals(Chain(case.ledger), cluster, case.question.recompute)
    return list(dict.fromkeys(tuple(stages) for stages in found))


def _what_if(case: _Case) -> tuple[Alternative, ...]:
    """The same question on clusters that are a little larger."""
    cluster = case.plan.cluster
    levels = cluster.levels
    wider = [_faster(level) for level in levels]
    outer = levels[-1].model_copy(update={"size": levels[-1].size + 1})
    one_more = "one more GPU" if len(levels) == 1 else f"one more group of {cluster.gpus // levels[-1].size} GPUs"
    clusters = [
        (f"{MORE - 1:.0%} more bandwidth", cluster.model_copy(update={"levels": tuple(wider)})),
        (one_more, cluster.model_copy(update={"levels": (*levels[:-1], outer)})),
    ]
    if cluster.memory_bytes is not None:
        more = int(cluster.memory_bytes * MORE_MEMORY)
        clusters.append((f"{MORE_MEMORY - 1:.0%} more memory", cluster.model_copy(update={"memory_bytes": more})))
    return tuple(_resolved(case, what, larger) for what, larger in clusters)


def _faster(level: Level) -> Level:
    ring = level.all_reduce_bandwidth_bytes_per_s
    return level.model_copy(
        update={
            "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s * MORE,
            "all_reduce_bandwidth_bytes_per_s": None if ring is None else ring * MORE,
        }
    )


def _resolved(case: _Case, what: str, cluster: Cluster) -> Alternative:
    try:
        plan = case.question.solve(case.ledger.profile, cluster)
    except InfeasibleError:
        return Alternative(what=what, config=None, seconds_per_minibatch=None, gain=None)
    config, seconds = plan.config, plan.predicted.seconds_per_minibatch
    if cluster.gpus == case.plan.cluster.gpus:
        # The plan itself runs there, too. The search stops close to its bound, so its find can be a little slower.
        own_s = case.question.price(case.ledger, case.stages, cluster).seconds_per_minibatch
        if own_s < seconds:
            config, seconds = case.plan.config, own_s
    return _alternative(case, what, config, seconds)


def _alternative(case: _Case, what: str, config: str, seconds: float) -> Alternative:
    gain = case.seconds / seconds - 1
    return Alternative(what=what, config=config, seconds_per_minibatch=seconds, gain=0.0 if abs(gain) < _SAME else gain)
