"""Answer what a newcomer asks: does the model fit, how to split it, how fast is it, how few GPUs
will do.

The answer is that of `planner.solver.solve` for a few sizes of microbatches, of which the fastest
counts, and then for other numbers of GPUs.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.errors import InfeasibleError, InputError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.files import Record
from planner.formats.late import LateFailure
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.formats.shown import Shown
from planner.options.solving import SolveOptions
from planner.solver.clock import Clock
from planner.solver.problem.infeasible import explained
from planner.solver.sizes.microbatches import Profiles, Sizes, least_sample_s, promising_sizes
from planner.solver.solve import solve_unexplained
from planner.solver.tuning.record import STANDARD, Tuning


class FitRow(Record):
    """The fastest plan on some number of GPUs, or why there is none; in full for the number that
    was asked about.
    """

    gpus: int
    plan: Plan | None
    why_not: str = ""
    unknown: bool = False  # whether there was too little time to find a plan, or that there is none

    @property
    def seconds(self) -> float:
        """Seconds per minibatch; infinity without a plan."""
        return math.inf if self.plan is None else self.plan.predicted.seconds_per_minibatch


class Fit(Shown, Record):
    """The answer for the GPUs that were asked about, and for others, the largest first.

    Where a model fits, those are half as many again and again, down to the first number at which it
    does not; where it does not fit, twice as many, up to the first at which it does; as far as
    there is time.
    """

    model: str
    asked: FitRow
    others: tuple[FitRow, ...]
    # what was not looked at because the time ended: "microbatches of 4, 8"
    not_tried: tuple[str, ...] = ()
    folder: str = ""  # that has profile.json and plan.json
    model_file: str = ""  # as seen from there
    late_failures: tuple[LateFailure, ...] = ()  # which of these files could not be written


@dataclass(frozen=True)
class FitQuestion:
    """A model, by its profiles; GPUs, by the cluster that so many of them make; and the options of
    each plan.
    """

    profiles: Profiles
    gpus: int
    cluster_of: Callable[[int], Cluster]
    options: SolveOptions
    tuning: Tuning = STANDARD  # of each plan, and of how long the search for it may take

    @property
    def cluster(self) -> Cluster:
        """The GPUs that were asked about."""
        return self.cluster_of(self.gpus)

    def least_sample_s(self, profile: Profile) -> float:
        """Return seconds of a sample that no plan for one of the profiles is below, divided layers
        or not.
        """
        return least_sample_s(profile, self.cluster, self.options, self.profiles.ranks)


@dataclass(frozen=True)
class Best:
    """The fastest answer so far for the GPUs that were asked about, and what the time did not
    suffice for.
    """

    row: FitRow
    profile: Profile
    not_tried: tuple[str, ...] = ()


def fit(question: FitQuestion, clock: Clock | None = None) -> tuple[Fit, Profile]:
    """Find the fastest plan for a number of GPUs and for others, each with the same minibatch, and
    its profile.

    The `clock` of all answers together takes the place of the options' time limit.
    """
    options = question.options
    tuning = question.tuning
    clock = clock or Clock.of(options.time_limit_s, options.progress, tuning.clock)
    sizing = clock.part(tuning.fit.sizing_share)
    sizes = promising_sizes(question.profiles, question.cluster, options, sizing, tuning)

    began_s = time.monotonic()
    best = _fastest_size(question, sizes, clock.part(tuning.fit.solving_share))
    asked = best.row
    if asked.unknown:
        # What part of the time did not suffice for is tried with the rest.
        asked = row_for(question, best.profile, question.gpus, clock)
    took_s = time.monotonic() - began_s

    others, missed = _other_numbers(question, asked, best.profile, took_s, clock)
    answer = Fit(
        model=best.profile.model,
        asked=asked,
        others=tuple(sorted(others, key=lambda row: -row.gpus)),
        not_tried=(*best.not_tried, *missed),
    )
    return answer, best.profile


def row_for(question: FitQuestion, profile: Profile, gpus: int, clock: Clock) -> FitRow:
    """Solve for a number of GPUs; only for the one that was asked about is explained why nothing
    fits.
    """
    cluster = question.cluster_of(gpus)
    try:
        plan = solve_unexplained(profile, cluster, question.options, clock, question.tuning)
    except InputError:
        raise
    except PlannerError as obstacle:  # none fits, or there was too little time
        error = explained(obstacle) if gpus == question.gpus else obstacle
        unknown = not isinstance(error, InfeasibleError)
        return FitRow(gpus=gpus, plan=None, why_not=error.message, unknown=unknown)
    return FitRow(gpus=gpus, plan=plan)


def _fastest_size(question: FitQuestion, sizes: Sizes, clock: Clock) -> Best:
    """Solve for each size that is worth it until one is no faster than those before, or the time
    ends.
    """
    best: Best | None = None
    not_tried = []
    if sizes.unseen:
        not_tried.append(f"microbatches of {', '.join(map(str, sizes.unseen))}")

    for size in sizes.wanted:
        profile = question.profiles.at(size)
        if best is not None:
            if _cannot_be_faster(question, best.row.plan, profile):
                continue
            if clock.passed:
                not_tried.append(f"microbatches of {size}")
                break

        if _worth_dividing(question, sizes, size, profile, best):
            if not clock.passed:
                profile = question.profiles.divide(profile)
            elif question.profiles.ranks > 1:
                not_tried.append("tensor parallelism")

        clock.progress.step = f"{question.gpus} GPUs, microbatches of {size}"
        is_last = size == sizes.wanted[-1]
        share = 1 if is_last else question.tuning.fit.first_size_share
        row = row_for(question, profile, question.gpus, clock.part(share))
        if best is not None:
            row = _with_rows_of(row, best)

        if best is None or row.seconds < best.row.seconds:
            best = Best(row, profile)
        elif size != sizes.shared:
            break
        if best.row.plan is None:
            break  # nothing fits, or there was no time to find it

    assert best is not None
    return replace(best, not_tried=tuple(not_tried))


def _cannot_be_faster(question: FitQuestion, plan: Plan | None, profile: Profile) -> bool:
    """Return whether a plan is as fast as perfect balance is for another size of microbatches."""
    if plan is None:
        return False
    least_s = question.least_sample_s(profile)
    return plan.predicted.seconds_per_minibatch <= (plan.minibatch_size or 0) * least_s


def _worth_dividing(
    question: FitQuestion, sizes: Sizes, size: int, profile: Profile, best: Best | None
) -> bool:
    """Return whether ranks that divide layers may gain anything.

    Where they did not for one size of microbatches, they do not for smaller ones. Nor do they where
    a usual way is as good as perfect balance. Layers with experts are divided for microbatches that
    ranks share.
    """
    if sizes.shared is not None:
        return size == sizes.shared
    plan = None if best is None else best.row.plan
    if plan is not None and not plan.divides_layers:
        return False
    least_s = question.least_sample_s(profile)
    balanced_s = least_s * (1 + question.tuning.fit.balanced_share)
    return sizes.sample_s.get(size, math.inf) > balanced_s


def _with_rows_of(row: FitRow, best: Best) -> FitRow:
    """Return the answer with the usual ways of another size, where ranks share the samples of a
    microbatch.

    In the usual ways, a rank has as many samples as before.
    """
    plan = row.plan
    if plan is None or not plan.by_samples or best.row.plan is None:
        return row
    scale = (plan.microbatch_size or 1) / (
        best.profile.microbatch_size or plan.microbatch_size or 1
    )
    rows = []
    for way in best.row.plan.baselines:
        seconds = scale * way.seconds_per_microbatch
        rows.append(way.model_copy(update={"seconds_per_microbatch": seconds}))
    return row.model_copy(update={"plan": plan.model_copy(update={"baselines": tuple(rows)})})


def _other_numbers(
    question: FitQuestion,
    asked: FitRow,
    profile: Profile,
    took_s: float,
    clock: Clock,
) -> tuple[list[FitRow], list[str]]:
    """Solve for fewer GPUs down to those that do not do, or for more up to those that do, as far as
    there is time.

    `took_s` is how long the number that was asked about took. Return the rows, and what was not
    tried.
    """
    tuning = question.tuning.fit
    if asked.plan is not None:
        counts = [question.gpus // 2**n for n in range(1, question.gpus.bit_length())]
    else:
        counts = [question.gpus * 2**n for n in range(1, tuning.most_gpus_ratio.bit_length())]

    rows = list[FitRow]()
    took_s *= tuning.next_seconds_ratio
    for index, count in enumerate(counts):
        left_s = clock.left_s
        if left_s is not None and left_s <= tuning.max_seconds_ratio * took_s:
            return rows, [_gpus_words(counts[index:])]
        clock.progress.step = f"{count} GPUs"
        began_s = time.monotonic()
        rows.append(row_for(question, profile, count, clock.part(1 / (len(counts) - index))))
        took_s = time.monotonic() - began_s
        if (rows[-1].plan is None) == (asked.plan is not None):
            break
    return rows, []


def _gpus_words(counts: Sequence[int]) -> str:
    """Write numbers of GPUs: "1 GPU", "4, 2, 1 GPUs"."""
    numbers = ", ".join(map(str, counts))
    return f"{numbers} GPU{'' if numbers == '1' else 's'}"
