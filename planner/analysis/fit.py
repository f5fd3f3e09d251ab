"""Answer what a newcomer asks: does the model fit, how to split it, how fast is it, how few GPUs will do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.analysis.compare import with_baselines
from planner.errors import InputError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.files import Record
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.formats.shown import Shown
from planner.options.solving import SolveOptions
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import Patience

SOLVING = 0.6  # share of the time for the cluster that was asked about; other numbers of GPUs share the rest
MOST_TIMES = 16  # as many GPUs as asked are tried where the model does not fit


class FitRow(Record):
    """The fastest plan on some number of GPUs, or why there is none."""

    gpus: int
    plan: Plan | None
    why_not: str = ""


class Fit(Shown, Record):
    """The answer for the GPUs that were asked about, and for others, the largest first.

    Where a model fits, those are half as many again and again, down to the first number at which it does not; where it
    does not fit, twice as many, up to the first at which it does.
    """

    model: str
    asked: FitRow
    others: tuple[FitRow, ...]
    folder: str = ""  # that has the model file, profile.json and plan.json
    model_file: str = ""


def fit(
    profile: Profile,
    gpus: int,
    cluster_of: Callable[[int], Cluster],
    options: SolveOptions,
    patience: Patience | None = None,
) -> Fit:
    """Find the fastest plan for a number of GPUs and for others, each with the same minibatch.

    `patience`: how long all answers may take together, in place of the options' time limit.
    """
    patience = patience or Patience.of(options.time_limit_s, options.progress)
    options = replace(options, microbatches=options.microbatches_on(cluster_of(gpus), profile), minibatch=None)

    def row(count: int, share: float) -> FitRow:
        try:
            plan = find_plan(profile, cluster_of(count), options, patience.part(share))
        except InputError:
            raise
        except PlannerError as error:  # none fits, or there was too little time
            return FitRow(gpus=count, plan=None, why_not=error.message)
        return FitRow(gpus=count, plan=with_baselines(profile, plan, patience))

    asked = row(gpus, SOLVING)
    others = list[FitRow]()
    fewer = [gpus // 2**n for n in range(1, gpus.bit_length())]
    counts = [gpus * 2**n for n in range(1, MOST_TIMES.bit_length())] if asked.plan is None else fewer
    for index, count in enumerate(counts):
        others.append(row(count, 1 / (len(counts) - index)))
        if (others[-1].plan is None) == (asked.plan is not None):
            break
    return Fit(model=profile.model, asked=asked, others=tuple(sorted(others, key=lambda row: -row.gpus)))
