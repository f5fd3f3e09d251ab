"""Explain why no plan fits the memory, and find the smallest change that makes one fit."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from planner.cost.candidate import Candidate
from planner.errors import InfeasibleError, PlannerError
from planner.formats.plan_parts import short_config
from planner.solver.clock import Clock, OutOfTimeError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.units import counted, format_bytes, format_memory

# A search for any plan that fits this many GPUs of this much memory.
Fits = Callable[[int, int], Evaluation | None]


class UnexplainedError(InfeasibleError):
    """No plan fits the memory, and why is not known yet.

    To know it takes searches, which only the last answer needs: see `explained`.
    """

    def __init__(self, explanation: Callable[[], InfeasibleError]) -> None:
        super().__init__("no plan fits the memory")
        self.explanation = explanation


def explained(error: PlannerError) -> PlannerError:
    """Return the error, with the smallest change that makes a plan fit where that is the matter."""
    if not isinstance(error, UnexplainedError):
        return error
    return error.explanation()


PLENTY = 2**60  # bytes: more than any plan needs


def against_rules(problem: Problem) -> InfeasibleError:
    """Return the error for rules that no plan keeps."""
    return InfeasibleError(
        f"no plan on {problem.cluster.gpus} GPUs keeps the rules for stages, whatever the memory",
        hint="leave some of them out, such as `max_stages` or `shard_optimizer`",
    )


def without_room(problem: Problem, memory_bytes: int, taken_bytes: int) -> InfeasibleError:
    """Return the error for GPUs whose memory is gone before there is a tensor."""
    gpus = counted(problem.cluster.gpus * problem.degree, "GPU")
    taken = format_memory(taken_bytes)
    return InfeasibleError(
        f"no plan fits {gpus} of {format_memory(memory_bytes)}: the context and the communicators "
        f"of a process take {taken} of each",
        hint=f"give a `memory` of much more than {taken}",
    )


def explain(problem: Problem, fits: Fits, others: Mapping[str, Fits]) -> InfeasibleError:
    """Return the error for a memory that no plan fits: the stage, and changes that would help.

    Args:
        problem: whose clock ends the searches for changes.
        fits: a search for a plan that keeps the problem's rules.
        others: searches that allow more, by the arguments that ask for them; the first that helps
            is named.
    """
    cluster = problem.cluster
    clock = problem.budget.clock
    if cluster.memory_bytes is None:
        return against_rules(problem)

    with suppress(OutOfTimeError):
        if fits(cluster.gpus, PLENTY) is None:
            return against_rules(problem)

    # 1. The plan that needs least memory.
    plan, proven = _leanest_plan(problem, fits, cluster.memory_bytes)
    message = f"no plan fits {_size(problem)}"
    if plan is None:
        return InfeasibleError(message, hint=_hint_out_of_time(clock))

    # 2. Its stage that needs most.
    totals = plan.price.gpu_bytes
    worst = totals.index(max(totals))
    needed_bytes = problem.reserve.whole(totals[worst])
    over_bytes = needed_bytes - problem.reserve.whole(cluster.memory_bytes)
    config = short_config(plan.divided(problem.degree).config)

    # 3. Changes that would help.
    changes = [_memory_change(needed_bytes, proven)]
    changes += _first_of(others, cluster.gpus, cluster.memory_bytes, clock)
    changes += _more_gpus(problem, fits, cluster.memory_bytes)

    return InfeasibleError(
        f"{message}: in the plan that needs least, {config}, "
        f"stage {worst} ({_layer_names(problem, plan.stages[worst])}) "
        f"needs {format_bytes(needed_bytes)}, {format_bytes(over_bytes)} too much",
        hint="; so would ".join(changes),
        least_bytes=needed_bytes,
    )


def _size(problem: Problem) -> str:
    assert problem.cluster.memory_bytes is not None
    gpus = counted(problem.cluster.gpus * problem.degree, "GPU")
    return f"{gpus} of {format_memory(problem.reserve.whole(problem.cluster.memory_bytes))}"


def _hint_out_of_time(clock: Clock) -> str:
    why = "the time for the search ran out"
    if clock.stop.is_set():
        why = "the search was interrupted"
    return f"{why} before it was known what would: give a longer `time_limit_s`, or try more `gpus`"


def _layer_names(problem: Problem, stage: Candidate) -> str:
    layers = problem.layer_costs.profile.layers
    first = layers[min(stage.layers)].name
    last = layers[max(stage.layers)].name
    if first == last:
        return f"layer '{first}'"
    return f"layers '{first}' to '{last}'"


def _memory_change(needed_bytes: int, proven: bool) -> str:
    argument = f"`memory={round_up(needed_bytes)}`"
    if proven:
        return f"the smallest memory that would do is {argument}"
    return f"{argument} would do, if not less"


def _leanest_plan(
    problem: Problem,
    fits: Fits,
    memory_bytes: int,
) -> tuple[Evaluation | None, bool]:
    """Return the plan that needs least memory above `memory_bytes`, and whether that is proven."""
    leanest: Evaluation | None = None

    def needed(trial_bytes: int) -> int | None:
        nonlocal leanest
        plan = fits(problem.cluster.gpus, trial_bytes)
        if plan is None:
            return None

        leanest = plan
        return max(plan.price.gpu_bytes)

    _, proven = _least(
        needed,
        memory_bytes,
        problem.budget.clock,
        precision=problem.tuning.explanation.memory_precision,
    )

    return leanest, proven


def _first_of(
    others: Mapping[str, Fits],
    gpus: int,
    memory_bytes: int,
    clock: Clock,
) -> list[str]:
    """Return the first argument whose search finds a plan; empty if none does in time."""
    with suppress(OutOfTimeError):
        for argument, allows in others.items():
            clock.check()
            if allows(gpus, memory_bytes) is not None:
                return [argument]
    return []


def _more_gpus(problem: Problem, fits: Fits, memory_bytes: int) -> list[str]:
    """Return the fewest GPUs on which a plan fits, as an argument where there is one; empty if they
    are not known.
    """

    def enough(gpus: int) -> int | None:
        if fits(gpus, memory_bytes) is None:
            return None
        return gpus

    gpus, proven = _least(
        enough,
        problem.cluster.gpus,
        problem.budget.clock,
        problem.tuning.explanation.most_gpus_ratio,
    )

    if gpus is None or not proven:
        return []
    total = gpus * problem.degree
    if len(problem.cluster.levels) == 1:
        return [f"`gpus={total}`"]
    # Whoever has said how many servers there are gives no number of GPUs.
    per_server = problem.cluster.levels[0].size * problem.degree
    servers = f", {total // per_server} servers of {per_server}" if total % per_server == 0 else ""
    return [f"{counted(total, 'GPU')}{servers}"]


def _least(
    enough: Callable[[int], int | None],
    low: int,
    clock: Clock,
    most: float = math.inf,
    precision: float = 0.0,
) -> tuple[int | None, bool]:
    """Return the least number above `low` that is enough, and whether that is proven.

    It is not if the clock passes before.

    Args:
        enough: returns for a number that is enough the same or a smaller one that is, and None for
            others.
        low: a number that is not enough.
        clock: of the trials.
        most: times `low` up to which numbers are tried.
        precision: relative, of the least number.
    """
    high: int | None = None
    limit = most * low
    with suppress(OutOfTimeError):
        # Double until something is enough, then bisect.
        while high is None or high - low > max(1, high * precision):
            trial = 2 * low if high is None else (low + high) // 2
            if trial > limit:
                break

            clock.check()
            least = enough(trial)
            if least is None:
                low = trial
            else:
                high = least

        return high, True

    return high, False


def round_up(count: int) -> str:
    """Format bytes as an argument of three digits, never below `count`: 1_234_567 -> "1.24MB"."""
    for prefix, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            digits = max(0, 2 - int(math.log10(count / size)))
            rounded = math.ceil(count / size * 10**digits) / 10**digits
            return f"{rounded:.{digits}f}{prefix}B"
    return f"{count}B"
