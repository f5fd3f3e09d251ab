"""Answer what a newcomer asks: does the model fit, how to split it, how fast is it, how few GPUs
will do.

The answer is that of `planner.solver.solve` for a few sizes of microbatches, of which the fastest
counts, and then for other numbers of GPUs.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from planner.cost.context import with_context
from planner.errors import ClusterError, InfeasibleError, InputError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import cluster_for
from planner.formats.files import replace
from planner.formats.fit import Fit, FitRow, TrainingRun
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay
from planner.formats.profile import Profile
from planner.formats.quantities import MOST_GPUS
from planner.options.solving import SolveOptions
from planner.plan.rank_groups import groups_of
from planner.solver.alternatives.table import table_budget
from planner.solver.alternatives.usual_ways import usual_ways
from planner.solver.clock import Clock
from planner.solver.request import Request
from planner.solver.sizes.microbatches import Profiles, Sizes, least_sample_s, promising_sizes
from planner.solver.solve import solve, solve_unexplained
from planner.solver.tuning.record import STANDARD, Tuning
from planner.units import counted


@dataclass(frozen=True)
class FitRequest:
    """What `fit` is asked.

    Attributes:
        profiles: of the model, by the samples of a microbatch.
        gpus: how many there are.
        cluster_of: returns the cluster that so many of them make.
        options: of each plan.
        clock: when all answers must be there.
        tuning: of each plan, and of how long the search for it may take.
        run: the whole training, where it is to be paid: then more GPUs are tried, too.
        alone: the clusters of each kind alone, where GPUs are of several kinds.
        only_asked: whether other numbers of GPUs are no part of the question.
        context: numbers of ranks that may divide sequences, beside 1.
        whole_sequences: whether each rank may have whole ones.
    """

    profiles: Profiles
    gpus: int
    cluster_of: Callable[[int], Cluster]
    options: SolveOptions
    clock: Clock
    tuning: Tuning = STANDARD
    run: TrainingRun | None = None
    alone: Sequence[Cluster] = ()
    only_asked: bool = False
    context: Sequence[int] = ()
    whole_sequences: bool = True

    def about(self, profile: Profile, clock: Clock) -> Request:
        """Return the request for a plan of all GPUs."""
        return self.on(self.cluster_of(self.gpus), profile, clock)

    def on(self, cluster: Cluster, profile: Profile, clock: Clock) -> Request:
        """Return the request for a plan on a cluster."""
        known = cluster_for(profile, cluster)
        return Request(profile, known, self.options, clock, self.tuning)

    def beside(self, *, fits: bool) -> list[Cluster]:
        """Return the clusters to look at beside all GPUs, the nearest first: smaller ones where the
        model fits, else larger ones; both where the training is to be paid; none where the question
        is about these alone.
        """
        if self.only_asked:
            return []
        if not fits:
            return self._larger(self.tuning.fit.most_gpus_ratio.bit_length() - 1)
        if self.run is None:
            return self._smaller()
        return _by_turns(self._larger(self.tuning.fit.larger_counts), self._smaller())

    def _larger(self, count: int) -> list[Cluster]:
        """Return so many clusters of twice as many GPUs again and again, as far as can be solved
        for.
        """
        counts = [self.gpus * 2**n for n in range(1, count + 1)]
        return [self.cluster_of(gpus) for gpus in counts if gpus <= MOST_GPUS]

    def _smaller(self) -> list[Cluster]:
        """Return each kind alone, or clusters of half as many GPUs again and again."""
        if self.alone:
            return list(self.alone)
        return [self.cluster_of(self.gpus // 2**n) for n in range(1, self.gpus.bit_length())]

    @property
    def per_server(self) -> int:
        """GPUs of a server; 1 where all are joined alike."""
        joined = self.cluster_of(self.gpus).joined
        return joined[0].size if joined else 1

    def with_clock(self, clock: Clock) -> "FitRequest":
        """Ask for all answers at another time."""
        return replace(self, clock=clock)

    def least_sample_s(self, profile: Profile) -> float:
        """Return seconds of a sample that no plan for the profile is below, divided layers or
        not.
        """
        return least_sample_s(self.about(profile, self.clock), self.profiles.ranks)


def fit(request: FitRequest) -> tuple[Fit, Profile]:
    """Find the fastest plan for a number of GPUs and for others, each with the same minibatch, and
    its profile.
    """
    clock = request.clock
    tuning = request.tuning.fit
    sizing = request.about(request.profiles.smallest, clock.part(tuning.sizing_share))
    sizes = promising_sizes(request.profiles, sizing)

    began_s = time.monotonic()
    solving = clock.part(tuning.solving_share)
    if request.context:
        solving = solving.part(tuning.whole_share)
    search = _SizeSearch(request, sizes, solving)
    search.run()
    search.divide_sequences()
    profile = search.profile
    asked = search.best
    if asked.unknown:
        # What part of the time did not suffice for is tried with the rest, and with a few seconds
        # where estimates took all of it.
        asked = _row_asked(request, profile, clock.at_least(tuning.least_answer_s))

    took_s = time.monotonic() - began_s

    others, missed = _other_numbers(request, asked, profile, took_s)
    answer = Fit(
        model=profile.model,
        asked=asked,
        others=tuple(sorted(others, key=lambda row: -row.gpus)),
        not_tried=(*search.not_tried, *missed),
    )

    if request.run is not None:
        answer = answer.paid(request.run)
    return answer, profile


def _row_asked(
    request: FitRequest,
    profile: Profile,
    clock: Clock,
    find: Callable[[Request], Plan] = solve,
) -> FitRow:
    """Solve for the number of GPUs that was asked about; `solve` explains why nothing fits."""
    return _row(request.about(profile, clock), find)


def _row_beside(request: FitRequest, profile: Profile, cluster: Cluster, clock: Clock) -> FitRow:
    """Solve for another cluster, without explanations, which take searches.

    Of the numbers of ranks that the user named, those count that its GPUs make groups of.
    """
    asked = request.on(cluster, profile, clock)
    named = asked.options.tensor
    if not named:
        return _row(asked, solve_unexplained)

    possible = tuple(degree for degree in named if _makes_groups(asked.cluster, degree))
    if not possible:
        ranks = ", ".join(map(str, named))
        few = counted(cluster.gpus, "GPU")
        why_not = f"no groups of {ranks} ranks in {few}"
        return FitRow(gpus=cluster.gpus, plan=None, why_not=why_not)

    options = replace(asked.options, tensor=possible)
    return _row(asked.with_options(options), solve_unexplained)


def _makes_groups(cluster: Cluster, degree: int) -> bool:
    try:
        groups_of(cluster, degree)
    except ClusterError:
        return False
    return True


def _row(request: Request, find: Callable[[Request], Plan]) -> FitRow:
    gpus = request.cluster.gpus
    kinds = request.cluster.kinds_words
    try:
        return FitRow(gpus=gpus, kinds=kinds, plan=find(request))
    except InputError:
        raise
    except PlannerError as error:  # none fits, or there was too little time
        return FitRow(
            gpus=gpus,
            kinds=kinds,
            plan=None,
            why_not=error.message,
            hint=error.hint,
            unknown=not isinstance(error, InfeasibleError),
        )


@dataclass
class _SizeSearch:
    """The search for the fastest size of microbatches on the GPUs that were asked about.

    Attributes:
        request: what is asked.
        sizes: that are worth a search.
        clock: of the search.
        best: the fastest answer so far.
        profile: for that answer.
        not_tried: what the time did not suffice for.
    """

    request: FitRequest
    sizes: Sizes
    clock: Clock
    best: FitRow = field(init=False)
    profile: Profile = field(init=False)
    not_tried: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Solve for each size that is worth it until one is no faster than those before, or the
        time ends.
        """
        if self.sizes.unseen:
            self.not_tried.append(f"microbatches of {', '.join(map(str, self.sizes.unseen))}")
        first, *others = self.sizes.wanted
        self.profile = self._profile(first, None)
        self.best = self._solve(first, self.profile)
        if not self.sizes.any_fits and first == self.sizes.shared:
            self.best = self._with_rows_of_smallest(self.best)

        for size in others:
            plan = self.best.plan
            if plan is None and self.profile.microbatch_size != self.sizes.shared:
                return  # nothing fits, or there was no time to find it
            in_time = not self.clock.passed
            estimated = size in self.request.profiles.known
            if plan is not None and (in_time or estimated) and self._cannot_be_faster(plan, size):
                continue
            if plan is not None and not in_time:
                if size not in self.sizes.unseen:
                    self.not_tried.append(f"microbatches of {size}")
                return

            profile = self._profile(size, plan)
            row = self._solve(size, profile)
            if plan is not None:
                row = self._with_rows_of(plan, row)
            if plan is None or row.seconds < self.best.seconds:
                self.best = row
                self.profile = profile
            elif size != self.sizes.shared:
                return

    def divide_sequences(self) -> None:
        """Solve with sequences that ranks divide, and keep what is faster than whole ones."""
        contexts = self.request.context
        if not contexts:
            return

        # 1. The profile to divide, for the size that is the best for whole sequences.
        profiles = self.request.profiles
        whole = self.best.plan
        size = self.sizes.wanted[-1] if whole is None else (whole.microbatch_size or 1)
        base = profiles.at(size)
        if self._asks_for_ranks or self.profile.tensor is not None:
            base = profiles.divided_at(size)
        if not self.request.whole_sequences:
            self.best = replace(self.best, plan=None, why_not="no sequence may be whole")

        # 2. The middle one first: it is nearest to all others, where there is time for one alone.
        middle = contexts[len(contexts) // 2]
        contexts = (middle, *(ranks for ranks in contexts if ranks != middle))
        for number, context in enumerate(contexts):
            if number > 0 and self.request.clock.passed:
                left = ", ".join(map(str, contexts[number:]))
                self.not_tried.append(f"context parallelism of {left} ranks")
                return
            self._solve_divided(context, base, 1 / (len(contexts) - number))

    def _solve_divided(self, context: int, base: Profile, share: float) -> None:
        """Solve with sequences that so many ranks divide."""
        request = self.request
        degrees = _degrees_beside(context, request.options.tensor, base, request.per_server)
        if not degrees:
            return
        request.clock.progress.step = f"{request.gpus} GPUs, context parallelism of {context}"

        # 1. The question: on groups of all these numbers of ranks.
        profile = with_context(base, (context,), degrees)
        ranks = tuple(costs.degree for costs in profile.tensor or ())
        tuning = request.tuning.fit
        part = request.clock.part(share * tuning.divided_share)
        asked = request.about(profile, part.at_least(tuning.least_divided_s))
        options = asked.options.changed(tensor=ranks)

        # 2. Its answer, if it is faster, or says why nothing fits.
        row = _row(asked.with_options(options), solve_unexplained)
        faster = row.plan is not None and row.seconds < self.best.seconds
        nothing_fits = row.plan is None and self.best.plan is None
        if faster or (nothing_fits and not request.whole_sequences):
            self.best = row
            self.profile = profile

    @property
    def _asks_for_ranks(self) -> bool:
        """Whether the user named numbers of ranks that divide layers."""
        return max(self.request.options.tensor, default=1) > 1

    def _profile(self, size: int, best: Plan | None) -> Profile:
        """Return the profile for a size, with layers that ranks may divide where that may gain
        anything.
        """
        profiles = self.request.profiles
        profile = profiles.at(size)
        if not self._worth_dividing(size, profile, best):
            return profile

        # Where no usual way fits, undivided layers have few good plans, whatever the time.
        needed = self._asks_for_ranks or not self.sizes.any_fits
        if needed or not self.clock.passed:
            return profiles.divided_at(size)

        if profiles.ranks > 1:
            self.not_tried.append("tensor parallelism")
        return profile

    def _solve(self, size: int, profile: Profile) -> FitRow:
        request = self.request
        self.clock.progress.step = f"{request.gpus} GPUs, microbatches of {size}"
        is_last = size == self.sizes.wanted[-1]
        share = 1 if is_last else request.tuning.fit.first_size_share

        # Where another size has an answer, or is still to be tried, nobody reads why nothing fits
        # at this one, and no other schedule takes its place.
        first_hope = not self.sizes.any_fits and size == self.sizes.shared and not is_last
        answered = size != self.sizes.wanted[0] and self.best.plan is not None
        find = solve_unexplained if first_hope or answered else solve
        return _row_asked(request, profile, self.clock.part(share), find)

    def _cannot_be_faster(self, plan: Plan, size: int) -> bool:
        """Return whether a plan is as fast as perfect balance is for another size of
        microbatches.
        """
        least_s = self.request.least_sample_s(self.request.profiles.at(size))
        return plan.predicted.seconds_per_minibatch <= (plan.minibatch_size or 0) * least_s

    def _worth_dividing(self, size: int, profile: Profile, best: Plan | None) -> bool:
        """Return whether ranks that divide layers may gain anything.

        Where they did not for one size of microbatches, they do not for smaller ones. Nor do they
        where a usual way is as good as perfect balance. Layers with experts are divided for
        microbatches that ranks share.
        """
        if self._asks_for_ranks:
            return True
        if self.sizes.shared is not None and (best is not None or self.sizes.any_fits):
            return size == self.sizes.shared
        if best is not None and not best.divides_layers:
            return False

        least_s = self.request.least_sample_s(profile)
        balanced_s = least_s * (1 + self.request.tuning.fit.balanced_share)
        return self.sizes.sample_s.get(size, math.inf) > balanced_s

    def _with_rows_of(self, best: Plan, row: FitRow) -> FitRow:
        """Return the answer with the usual ways of another size, where ranks share the samples of a
        microbatch.

        In the usual ways, a rank has as many samples as before.
        """
        return _with_rows(row, best.baselines, self.profile)

    def _with_rows_of_smallest(self, row: FitRow) -> FitRow:
        """Return the answer of ranks that share a microbatch with the usual ways of the smallest
        size, none of which fits.
        """
        profile = self.request.profiles.smallest
        request = self.request.about(profile, self.clock)
        ways = usual_ways(request, table_budget(request))
        return _with_rows(row, [way.described() for way in ways], profile)


def _with_rows(row: FitRow, ways: Sequence[OtherWay], profile: Profile) -> FitRow:
    """Return an answer whose ranks share the samples of a microbatch with the usual ways of a
    profile for smaller ones.
    """
    plan = row.plan
    if plan is None or not plan.by_samples:
        return row

    size = plan.microbatch_size or 1
    scale = size / (profile.microbatch_size or size)
    rows = []
    for way in ways:
        seconds = scale * way.seconds_per_microbatch
        rows.append(replace(way, seconds_per_microbatch=seconds))

    return replace(row, plan=replace(plan, baselines=tuple(rows)))


def _other_numbers(
    request: FitRequest,
    asked: FitRow,
    profile: Profile,
    took_s: float,
) -> tuple[list[FitRow], list[str]]:
    """Solve for fewer GPUs down to those that do not do, or for more up to those that do, as far as
    there is time; of several kinds, for each alone.

    `took_s` is how long the number that was asked about took. Return the rows, and what was not
    tried.
    """
    clock = request.clock
    tuning = request.tuning.fit
    fits = asked.plan is not None
    clusters = request.beside(fits=fits)

    rows = list[FitRow]()
    took_s *= tuning.next_seconds_ratio
    for index, cluster in enumerate(clusters):
        # A kind alone has fewer GPUs and one order: part of the time says something of it.
        needed_s = 0.0 if request.alone else tuning.max_seconds_ratio * took_s
        left_s = clock.left_s
        if left_s is not None and left_s <= needed_s:
            return rows, [_gpus_words(clusters[index:])]

        clock.progress.step = _gpus_words([cluster])
        began_s = time.monotonic()
        part = clock.part(1 / (len(clusters) - index))
        rows.append(_row_beside(request, profile, cluster, part))
        took_s = time.monotonic() - began_s
        answered = rows[-1].plan is not None
        lacking = not answered and not rows[-1].unknown
        if cluster.gpus < request.gpus and lacking and not request.alone:
            break  # nor do fewer do; but where GPUs of one kind do not, those of another may
        if not fits and answered:
            break

    return rows, []


def _degrees_beside(
    context: int, asked: Sequence[int], profile: Profile, per_server: int
) -> list[int]:
    """Return the numbers of ranks that divide layers beside those that divide sequences: a group
    stays in a server if the latter alone do.
    """
    known = {1, *(costs.degree for costs in profile.tensor or ())}
    wanted = known.intersection(asked) if asked else known
    if context > per_server:
        return sorted(wanted & {1})
    return sorted(degree for degree in wanted if per_server % (degree * context) == 0)


def _by_turns(more: Sequence[Cluster], fewer: Sequence[Cluster]) -> list[Cluster]:
    """Return clusters from the nearest on, of more and of fewer GPUs by turns."""
    pairs = zip_longest(more, fewer)
    return [cluster for pair in pairs for cluster in pair if cluster is not None]


def _gpus_words(clusters: Sequence[Cluster]) -> str:
    """Write numbers of GPUs: "1 GPU", "4, 2, 1 GPUs", "12 v100 GPUs"."""
    numbers = ", ".join(cluster.kinds_words or str(cluster.gpus) for cluster in clusters)
    return f"{numbers} GPU{'' if numbers == '1' else 's'}"
