"""Explain why no plan fits the memory, and find the smallest change that makes one fit."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from planner.errors import InfeasibleError
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


PLENTY = 2**60  # bytes: more than any plan needs
_PRECISION = 1e-4  # of the smallest memory
_MOST_GPUS_FACTOR = 64


def against_rules(problem: Problem) -> InfeasibleError:
    """Return the error for rules that no plan keeps."""
    return InfeasibleError(
        f"no plan on {problem.cluster.gpus} GPUs keeps the rules for stages, whatever the memory",
        hint="leave some of them out, such as `max_stages` or `shard_optimizer`",
    )


def explain(problem: Problem, fits: Fits, others: Mapping[str, Fits]) -> InfeasibleError:
    """Return the error for a cluster whose memory no plan fits: which stage does not, and which changes would help.

    `others` are searches that allow more, by the arguments that ask for them; the first that helps is named.
    """
    cluster, deadline, whole = problem.cluster, problem.budget.deadline, problem.reserve.whole
    if (memory_bytes := cluster.memory_bytes) is None:
        return against_rules(problem)
    with suppress(OutOfTimeError):
        if fits(cluster.gpus, PLENTY) is None:
            return against_rules(problem)
    met: list[Evaluation] = []

    def enough(memory_bytes: int) -> int | None:
        if (plan := fits(cluster.gpus, memory_bytes)) is None:
            return None
        met.append(plan)
        return max(plan.price.gpu_bytes)

    _, proven = _least(enough, memory_bytes, deadline, precision=_PRECISION)
    message = f"no plan fits {cluster.gpus * problem.degree} GPUs of {format_memory(whole(memory_bytes))}"
    if not met:
        why = "the search was interrupted" if deadline.stop.is_set() else "the time limit passed"
        hint = f"{why} before it was known what would: give a longer `time_limit_s`, or try more `gpus`"
        return InfeasibleError(message, hint=hint)
    totals = met[-1].price.gpu_bytes
    worst = max(range(len(totals)), key=totals.__getitem__)
    stage, needed = met[-1].stages[worst], whole(totals[worst])
    layers = [problem.layer_costs.profile.layers[index].name for index in sorted(stage.layers)]
    names = f"layer '{layers[0]}'" if len(layers) == 1 else f"layers '{layers[0]}' to '{layers[-1]}'"
    smallest = f"`memory_bytes={round_up(needed)}`"
    hint = f"the smallest memory that would do is {smallest}" if proven else f"{smallest} would do, if not less"
    with suppress(OutOfTimeError):
        for argument, allows in others.items():
            deadline.check()
            if allows(cluster.gpus, memory_bytes) is not None:
                hint += f"; so would {argument}"
                break
    more, known = _least(
        lambda gpus: None if fits(gpus, memory_bytes) is None else gpus, cluster.gpus, deadline, _MOST_GPUS_FACTOR
    )
    if more is not None and known:
        hint += f"; so would `gpus={more * problem.degree}`"
    return InfeasibleError(
        f"{message}: in the plan that needs least, {short_config(met[-1].divided(problem.degree).config)}, "
        f"stage {worst} ({names}) needs {format_bytes(needed)}, {format_bytes(needed - whole(memory_bytes))} too many",
        hint=hint,
        least_bytes=needed,
    )


def _least(
    enough: Callable[[int], int | None], low: int, deadline: Deadline, most: float = math.inf, precision: float = 0.0
) -> tuple[int | None, bool]:
    """Return the least number above `low` that is enough, and whether that is proven or the deadline passed before.

    `enough` returns for a number that is enough the same or a smaller one that is, and None for others. Numbers up to
    `most` times `low`, which is not enough, are tried, with this relative precision.
    """
    high, limit = None, most * low
    with suppress(OutOfTimeError):
        # Double until something is enough, then bisect.
        while high is None or high - low > max(1, high * precision):
            if (trial := 2 * low if high is None else (low + high) // 2) > limit:
                break
            deadline.check()
            found = enough(trial)
            low, high = (trial, high) if found is None else (low, found)
        return high, True
    return high, False


def round_up(count: int) -> str:
    """Format bytes as an argument with three digits, never less than `count`: 1_234_567 -> "1.24MB"."""
    for prefix, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            digits = max(0, 2 - int(math.log10(count / size)))
            return f"{math.ceil(count / size * 10**digits) / 10**digits:.{digits}f}{prefix}B"
    return f"{count}B"
