"""Which method answers a request, and the answers of those other than the search over pipelines.

search   exact; GPUs alike; constraints that are forbidden cuts
ilp      an integer program: all constraints, GPUs that differ; clusters of one level
brute    every plan, for up to ten layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner.cost.layer_costs import Candidate
from planner.cost.price import Price
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.formats.cluster import DeviceKind
from planner.solver.candidates.deadline import NO_HURRY, Deadline
from planner.solver.infeasible import explain
from planner.solver.integer.request import Request
from planner.solver.reference.brute import brute_force
from planner.units import format_bytes

SolverName = Literal["auto", "search", "ilp", "brute"]
MethodName = Literal["search", "ilp", "brute"]

_PLENTY = 2**60  # bytes


@dataclass(frozen=True)
class Found:
    """Stages, a time that no plan beats, and who says so."""

    stages: tuple[Candidate, ...]
    bound_s: float
    name: str


def method_for(request: Request, solver: SolverName) -> MethodName:
    """The method for a request.

    Raises:
        InputError: when the solver asked for cannot answer it.
    """
    request.constraints.check(request.layer_costs.profile, request.cluster)
    wants = _beyond_the_search(request)
    if request.schedule.chunked and (wants is not None or solver in ("ilp", "brute")):
        wanted = wants or f"`solver={solver}`"
        raise InputError(
            f"the schedule {request.schedule} is solved by the search alone, which does not take {wanted}",
            hint="use another schedule, or leave them out",
        )
    if solver == "brute":
        if wants is not None:
            raise InputError(f"`solver=brute` does not take {wants}", hint="use `solver=auto`")
        return "brute"
    if solver == "search" and wants is not None:
        raise InputError(f"the search does not take {wants}", hint="use `solver=ilp` or `solver=auto`")
    return "ilp" if solver == "ilp" or wants is not None else "search"


def _beyond_the_search(request: Request) -> str | None:
    """What of the request the search cannot express, in words."""
    constraints = request.constraints
    if request.cluster.kinds:
        return "clusters whose GPUs differ"
    if constraints.stage_of or constraints.gpu_of:
        return "layers pinned to a stage or a GPU"
    if constraints.as_forbidden_cuts(request.layer_costs.profile, in_order=request.keeps_order) is None:
        return "layers kept together that are no neighbours in the profile's order"
    return None


def answer(request: Request, method: MethodName, deadline: Deadline) -> Found:
    """The best plan by a method other than the search over pipelines.

    Raises:
        InfeasibleError: when there is none.
        InputError: for what the method cannot express, or is too large for it.
        PlannerError: when the deadline passes before there is any.
    """
    try:
        found = _by_ilp(request, deadline) if method == "ilp" else _by_trying(request)
    except TimeoutError:
        raise PlannerError(
            "the time limit passed before any plan was found", hint="give a longer `time_limit_s`, or leave it out"
        ) from None
    if found is None:
        raise _infeasible(request, method)
    return found


def _by_ilp(request: Request, deadline: Deadline) -> Found | None:
    # Imported here: PuLP takes its time, and most requests need none of it.
    from planner.solver.integer.ilp import solve_ilp
    from planner.solver.integer.milp import installed

    solver = installed()[0]
    best = solve_ilp(request, deadline, solver)
    return None if best is None else Found(best.stages, best.bound_s, f"ilp, {solver}")


def _by_trying(request: Request) -> Found | None:
    request = request.without_constraints()
    best = brute_force(
        request.layer_costs,
        request.cluster,
        model=request.model,
        schedule=request.schedule,
        microbatches=request.microbatches,
        recompute=request.recompute,
        in_order=request.keeps_order,
    )
    return None if best is None else Found(best.stages, best.price.seconds_per_minibatch, "brute")


def _infeasible(request: Request, method: MethodName) -> InfeasibleError:
    """Why there is no plan: the constraints, or the memory."""

    def without_limit() -> Request:
        kinds = tuple(kind.model_copy(update={"memory_bytes": _PLENTY}) for kind in request.cluster.kinds)
        return _on(request, {"kinds": kinds, "memory_bytes": None})

    def again(other: Request) -> tuple[Sequence[Candidate], Price] | None:
        found = _by_ilp(other, NO_HURRY) if method == "ilp" else _by_trying(other)
        return None if found is None else (found.stages, other.priced(found.stages))

    def fits(gpus: int, memory_bytes: int) -> tuple[Sequence[Candidate], Price] | None:
        return again(_on(request, {"memory_bytes": memory_bytes})) if gpus == request.cluster.gpus else None

    unlimited = again(without_limit())
    if unlimited is None:
        return InfeasibleError(
            f"no plan on {request.cluster.gpus} GPUs respects the constraints, whatever the memory",
            hint="leave some of them out: layers that a stage needs must not be pinned to a later one",
        )
    if not request.cluster.kinds:
        return explain(request.layer_costs, request.cluster, fits, {})
    stages, cost = unlimited
    limits = [request.cluster.memory_of(_original(request, stage)) or _PLENTY for stage in stages]
    over = [held.total_bytes - limit for held, limit in zip(cost.memory, limits, strict=True)]
    worst = max(range(len(over)), key=over.__getitem__)
    return InfeasibleError(
        f"no plan fits the memory of the cluster's GPUs: in the fastest without a limit, stage {worst} needs "
        f"{format_bytes(cost.memory[worst].total_bytes)}, {format_bytes(max(over[worst], 0))} too many",
        hint="give the kinds of GPUs more memory_bytes, or more GPUs",
    )


def _original(request: Request, stage: Candidate) -> DeviceKind:
    """The kind of a stage before its memory was changed."""
    return request.cluster.kind_of(stage.ranks[0])


def _on(request: Request, update: dict[str, object]) -> Request:
    return replace(request, cluster=request.cluster.model_copy(update=update))
