"""Explain why no plan fits the memory, and find the smallest change that makes one fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from planner.errors import InfeasibleError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.plan_parts import short_config
from planner.solver.problem.budget import Deadline, OutOfTimeError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.units import format_bytes, format_memory

# A search for any plan that fits this many GPUs of this much memory.
Fits = Callable[[int, int], Evaluation | None]


class UnexplainedError(InfeasibleError):
    """No plan fits the memory, and why is not known yet: that takes searches, which only the last answer needs."""

    def __init__(self, explanation: Callable[[], InfeasibleError]) -> None:
        super().__init__("no plan fits the memory")
        self.explanation = explanation


def explained(error: InfeasibleError) -> InfeasibleError:
    """Return the error that says why no plan fits the memory."""
    return error.explanation() if isinstance(error, UnexplainedError) else error


PLENTY = 2**60  # bytes: more than any plan needs
_PRECISION = 1e-4  # of the smallest memory
_MOST_GPUS_FACTOR = 64


def against_constraints(problem: Problem) -> InfeasibleError:
    """Return the error for constraints that no plan respects."""
    return InfeasibleError(
        f"no plan on {problem.cluster.gpus} GPUs respects the constraints, whatever the memory",
        hint="leave some of them out: layers that a stage needs must not be pinned to a later one",
    )


def out_of_time(problem: Problem, leanest: Evaluation | None) -> PlannerError:
    """Return the error for a time limit that passed before any plan was found.

    Args:
        problem: for which no plan was found in time.
        leanest: of the plans that were met, the one that needs least memory.
    """
    message, hint = "the time limit passed before any plan was found", "give a longer `time_limit_s`, or leave it out"
    memory_bytes, whole = problem.cluster.memory_bytes, problem.reserve.whole
    if leanest is None or memory_bytes is None or (needed := max(leanest.price.gpu_bytes)) <= memory_bytes:
        return PlannerError(message, hint=hint)
    return PlannerError(
        f"{message}: none of those tried fits {format_memory(whole(memory_bytes))}, and the one that needs least, "
        f"{short_config(leanest.config)}, needs {format_bytes(whole(needed))}",
        hint=f"{hint}; at most `memory_bytes={round_up(whole(needed))}` is needed, and more GPUs or another schedule "
        "may do",
    )


def explain(problem: Problem, fits: Fits, others: Mapping[str, Fits]) -> InfeasibleError:
    """Return the error for a cluster whose memory no plan fits: which stage does not, and which changes would help.

    Args:
        problem: with too little memory.
        fits: the search.
        others: searches that allow more, by the arguments that ask for them; the first that helps is named.
    """
    cluster, deadline = problem.cluster, problem.budget.deadline
    whole = problem.reserve.whole
    if cluster.memory_bytes is None:
        return against_constraints(problem)
    with suppress(OutOfTimeError):
        if fits(cluster.gpus, PLENTY) is None:
            return against_constraints(problem)
    leanest, proven = _leanest(cluster, fits, deadline)
    if leanest is None:
        return InfeasibleError(
            f"no plan fits {cluster.gpus} GPUs of {format_memory(whole(cluster.memory_bytes))}",
            hint="the time limit passed before it was known what would: give a longer `time_limit_s`, or try more "
            "`gpus`",
        )
    stages, totals = leanest.stages, leanest.price.gpu_bytes
    worst = max(range(len(totals)), key=totals.__getitem__)
    layers = [problem.layer_costs.profile.layers[index].name for index in sorted(stages[worst].layers)]
    names = f"layer '{layers[0]}'" if len(layers) == 1 else f"layers '{layers[0]}' to '{layers[-1]}'"
    place = f"stage {worst} ({names})"
    over = whole(totals[worst]) - whole(cluster.memory_bytes)
    how = ("sharded", "recomputing its activations")
    said = zip(how, (stages[worst].options.sharded, stages[worst].options.recompute), strict=True)
    again = "".join(f", {each}" for each, true in said if true)
    again += "," if again else ""
    enough = f"`memory_bytes={round_up(whole(totals[worst]))}`"
    hint = f"the smallest memory that would do is {enough}" if proven else f"{enough} would do, if not less"
    with suppress(OutOfTimeError):
        for argument, allows in others.items():
            deadline.check()
            if allows(cluster.gpus, cluster.memory_bytes) is not None:
                hint += f"; so would {argument}"
                break
    more = _fewest_gpus(cluster, fits, deadline)
    if more is not None:
        hint += f"; so would `gpus={more}`"
    which = f"the plan that needs least{'' if proven else ' of those found in time'}"
    place = f"in {which}, {short_config(leanest.config)}, {place}"
    return InfeasibleError(
        f"no plan fits {cluster.gpus} GPUs of {format_memory(whole(cluster.memory_bytes))}: {place}{again} needs "
        f"{format_bytes(whole(totals[worst]))}, {format_bytes(over)} too many",
        hint=hint,
    )


def round_up(count: int) -> str:
    """Format bytes as an argument with three digits, never less than `count`: 1_234_567 -> "1.24MB"."""
    for prefix, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            digits = max(0, 2 - int(math.log10(count / size)))
            return f"{math.ceil(count / size * 10**digits) / 10**digits:.{digits}f}{prefix}B"
    return f"{count}B"


def _leanest(cluster: Cluster, fits: Fits, deadline: Deadline) -> tuple[Evaluation | None, bool]:
    """Return the plan whose largest stage is smallest.

    Returns:
        The plan, and whether it is proven to need least. If the deadline passed before, it is the best of those that
        were found, or None.
    """
    assert cluster.memory_bytes is not None
    low, high = cluster.memory_bytes, 2 * cluster.memory_bytes
    found: Evaluation | None = None
    with suppress(OutOfTimeError):
        # Double until something fits, then bisect: the answer is within a factor of two of the last failure.
        while (found := fits(cluster.gpus, high)) is None:
            deadline.check()
            low, high = high, 2 * high
        while high - low > max(1, high * _PRECISION):
            deadline.check()
            middle = (low + high) // 2
            if (better := fits(cluster.gpus, middle)) is None:
                low = middle
            else:
                found = better
                high = max(found.price.gpu_bytes)
        return found, True
    return found, False


def _fewest_gpus(cluster: Cluster, fits: Fits, deadline: Deadline) -> int | None:
    """Return the fewest GPUs of the same memory that some plan fits.

    None if not even many times as many suffice, or if the deadline passes before the fewest are known.
    """
    assert cluster.memory_bytes is not None
    low, high = cluster.gpus, 2 * cluster.gpus
    with suppress(OutOfTimeError):
        deadline.check()
        while fits(high, cluster.memory_bytes) is None:
            deadline.check()
            low, high = high, 2 * high
            if high > _MOST_GPUS_FACTOR * cluster.gpus:
                return None
        while high - low > 1:
            deadline.check()
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, cluster.memory_bytes) is None else (low, middle)
        return high
    return None
