"""Which sizes of microbatches are worth a search: those near the one at which the usual ways are
fastest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.formats.files import replace
from planner.formats.profile import Profile, has_experts
from planner.options.solving import SolveOptions
from planner.solver.alternatives.table import table_budget
from planner.solver.alternatives.usual_ways import usual_ways
from planner.solver.clock import Clock
from planner.solver.problem.bounds import balanced_s
from planner.solver.request import Request


@dataclass(frozen=True)
class Profiles:
    """The profiles of a model, by the samples of a microbatch; each is estimated once.

    Attributes:
        estimate: returns the profile for microbatches of so many samples.
        divide: adds the costs of layers that ranks divide to a profile.
        sizes: of microbatches that may be tried, ascending.
        ranks: at most, that divide layers.
        known: profiles that were estimated, by their sizes.
        known_divided: those with the costs of layers that ranks divide.
    """

    estimate: Callable[[int], Profile]
    divide: Callable[[Profile], Profile]
    sizes: Sequence[int]
    ranks: int = 1
    known: dict[int, Profile] = field(default_factory=dict)
    known_divided: dict[int, Profile] = field(default_factory=dict)

    @property
    def smallest(self) -> Profile:
        """The profile for the smallest microbatches."""
        return self.at(self.sizes[0])

    def at(self, size: int) -> Profile:
        """Return the profile for microbatches of so many samples."""
        if size not in self.known:
            self.known[size] = self.estimate(size)
        return self.known[size]

    def divided_at(self, size: int) -> Profile:
        """Return the profile with the costs of layers that ranks divide."""
        if size not in self.known_divided:
            self.known_divided[size] = self.divide(self.at(size))
        return self.known_divided[size]


@dataclass(frozen=True)
class Sizes:
    """What is known of sizes of microbatches before any search.

    Attributes:
        sample_s: seconds of a sample in the fastest usual way, by size; infinity where none fits.
        wanted: sizes that are worth a search, the most promising first.
        shared: the one of these at which ranks that divide experts have as many samples as in other
            plans.
        unseen: sizes that no time was left to look at.
    """

    sample_s: Mapping[int, float]
    wanted: tuple[int, ...]
    shared: int | None = None
    unseen: tuple[int, ...] = ()

    @property
    def any_fits(self) -> bool:
        """Whether any usual way fits at a size that was looked at."""
        return min(self.sample_s.values()) < math.inf


def promising_sizes(profiles: Profiles, request: Request) -> Sizes:
    """Look at few sizes, the most telling first: the two smallest, the one that should be the
    fastest on the line through them, and what is beside the fastest, until that is slower.

    On a size that is too small more is lost than by any search. So the first three are looked at
    even where no time is left. Where no usual way fits at the smallest size, all sizes are worth a
    search. Of a mixture, experts that ranks divide are the first hope then: no usual way has them,
    and most of the weights are theirs.
    """
    estimates = _Estimates(profiles, request)
    unseen = estimates.look_around()

    sample_s = estimates.sample_s
    likely = min(sample_s, key=lambda size: sample_s[size])
    shared = _shared_size(likely, profiles, request.options)
    if math.isinf(sample_s[likely]):
        sizes = tuple(profiles.sizes)
        if shared is not None:
            sizes = (shared, *(size for size in sizes if size != shared))
        return Sizes(sample_s, sizes, shared)

    smaller = [size for size in reversed(profiles.sizes) if size < likely]
    wanted = [likely, *smaller][: request.tuning.fit.most_sizes]
    if shared is not None:
        wanted.insert(1, shared)
    return Sizes(sample_s, tuple(wanted), shared, unseen)


@dataclass
class _Estimates:
    """Seconds of a sample in the fastest of the usual ways, by the samples of a microbatch."""

    profiles: Profiles
    request: Request  # with the profile of any size
    sample_s: dict[int, float] = field(default_factory=dict)

    def look_around(self) -> tuple[int, ...]:
        """Estimate the sizes that are worth it; return those that no time was left for."""
        sizes = self.profiles.sizes

        # 1. Two sizes, and where the line through them has its least: the same on a busy machine.
        self.look_at(sizes[0])
        if len(sizes) == 1 or math.isinf(self.sample_s[sizes[0]]):
            return ()

        self.look_at(sizes[1])
        promising = min(sizes, key=self.on_the_line)
        if promising not in self.sample_s:
            self.look_at(promising)

        # 2. From the fastest one downhill, as far as there is time.
        while (size := self._beside_the_fastest()) is not None:
            if self.request.clock.passed:
                return tuple(size for size in sizes if self._worth_a_look(size))
            self.look_at(size)

        return ()

    def look_at(self, size: int) -> None:
        """Estimate a size; infinity where no usual way fits."""
        clock = self.request.clock
        clock.progress.step = f"estimating microbatches of {size}"
        self.sample_s[size] = self._fastest_sample_s(self.profiles.at(size), clock)

    def on_the_line(self, size: int) -> float:
        """Return a sample's seconds, not simulated, with costs on the line through the two nearest
        sizes that were looked at.
        """
        nearest = sorted(self.sample_s, key=lambda seen: abs(math.log(seen / size)))
        one, other = sorted(nearest[:2])
        profile = extended(self.profiles.at(one), self.profiles.at(other), size)
        return self._fastest_sample_s(profile, None)

    def _beside_the_fastest(self) -> int | None:
        """Return the next size above or below the fastest one that was not looked at, and need not
        be slower by the line; None where there is none.
        """
        sizes = self.profiles.sizes
        place = sizes.index(min(self.sample_s, key=lambda size: self.sample_s[size]))
        beside = (*sizes[place + 1 : place + 2], *sizes[max(0, place - 1) : place])
        return next(filter(self._worth_a_look, beside), None)

    def _worth_a_look(self, size: int) -> bool:
        """Return whether a size was not looked at, and may be about as fast as the fastest."""
        if size in self.sample_s:
            return False
        slower_share = self.request.tuning.fit.slower_size_share
        return self.on_the_line(size) <= min(self.sample_s.values()) * (1 + slower_share)

    def _fastest_sample_s(self, profile: Profile, clock: Clock | None) -> float:
        """Return a sample's seconds in the fastest usual way that fits, not simulated without a
        clock.
        """
        request = replace(self.request, profile=profile, clock=clock or Clock.of(0.0))
        budget = request.budget() if clock is None else table_budget(request)
        ways = usual_ways(request, budget)
        fitting = [way.seconds_per_microbatch for way in ways if not way.over_memory_bytes]
        return min(fitting, default=math.inf) / (profile.microbatch_size or 1)


def least_sample_s(request: Request, ranks: int) -> float:
    """Return seconds of a sample that no plan is below.

    A schedule that drains takes no less than the first microbatch does, which passes all layers:
    where there are fewer microbatches than GPUs, this bounds the plan. `ranks` that divide layers
    compute that microbatch together, so that then only the GPUs' work in all is a bound: ranks that
    divide a layer take no less in all.
    """
    setting = request.setting
    seconds = balanced_s(request.layer_costs, setting)
    if ranks > 1 and setting.schedule.formula == "synchronous":
        seconds *= min(1.0, setting.microbatches / request.cluster.gpus)
    return seconds / setting.microbatches / (request.profile.microbatch_size or 1)


def _shared_size(likely: int, profiles: Profiles, options: SolveOptions) -> int | None:
    """Return the size at which each rank that divides experts has `likely` samples; None without
    experts.
    """
    shared = likely * profiles.ranks
    is_mixture = any(has_experts(layer.op) for layer in profiles.at(likely).layers)
    divides = (options.minibatch or 1) % shared == 0
    if is_mixture and divides and shared > likely and len(profiles.sizes) > 1:
        return shared
    return None


def extended(one: Profile, other: Profile, size: int) -> Profile:
    """Return the profile for microbatches of so many samples, on the line through those for two
    others.

    What layers exchange is that of `other`: for larger sizes pipelines look faster than they are.
    """
    first = one.microbatch_size or 1
    second = other.microbatch_size or 1
    times = (size - second) / (second - first)

    def on_the_line(begin: float, end: float) -> float:
        return max(0, end + times * (end - begin))

    layers = tuple(
        replace(
            after,
            forward_s=on_the_line(before.forward_s, after.forward_s),
            backward_s=on_the_line(before.backward_s, after.backward_s),
            saved_bytes=int(on_the_line(before.saved_bytes, after.saved_bytes)),
            workspace_bytes=int(on_the_line(before.workspace_bytes, after.workspace_bytes)),
        )
        for before, after in zip(one.layers, other.layers, strict=True)
    )

    kinds = other.kinds and tuple(
        replace(
            after,
            forward_s=tuple(map(on_the_line, before.forward_s, after.forward_s)),
            backward_s=tuple(map(on_the_line, before.backward_s, after.backward_s)),
            workspace_bytes=tuple(
                int(on_the_line(*sizes))
                for sizes in zip(before.workspace_bytes, after.workspace_bytes, strict=True)
            ),
        )
        for before, after in zip(one.kinds or (), other.kinds, strict=True)
    )

    return replace(other, layers=layers, kinds=kinds, microbatch_size=size)
