"""Which sizes of microbatches are worth a search: those near the one at which the usual ways are fastest."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.cost.tensor import layer_costs_on
from planner.formats.cluster import Cluster
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.solver.alternatives.usual_ways import usual_ways
from planner.solver.clock import Clock
from planner.solver.problem.bounds import balanced_s
from planner.solver.problem.budget import Budget
from planner.solver.question import setting_of
from planner.solver.tuning.record import Tuning


@dataclass(frozen=True)
class Profiles:
    """The profiles of a model, by the samples of a microbatch; each is estimated once.

    Attributes:
        estimate: returns the profile for microbatches of so many samples.
        divide: adds the costs of layers that ranks divide to a profile.
        sizes: of microbatches that may be tried, ascending.
        ranks: at most, that divide layers.
        known: profiles that were estimated, by their sizes.
    """

    estimate: Callable[[int], Profile]
    divide: Callable[[Profile], Profile]
    sizes: Sequence[int]
    ranks: int = 1
    known: dict[int, Profile] = field(default_factory=dict)

    def at(self, size: int) -> Profile:
        """Return the profile for microbatches of so many samples."""
        if size not in self.known:
            self.known[size] = self.estimate(size)
        return self.known[size]


@dataclass(frozen=True)
class Sizes:
    """What is known of sizes of microbatches before any search.

    Attributes:
        sample_s: seconds of a sample in the fastest usual way, by size; infinity where none fits.
        wanted: sizes that are worth a search, the most promising first.
        shared: the one of these at which ranks that divide experts have as many samples as in other plans.
        unseen: sizes that no time was left to look at.
    """

    sample_s: Mapping[int, float]
    wanted: tuple[int, ...]
    shared: int | None = None
    unseen: tuple[int, ...] = ()


def promising_sizes(
    profiles: Profiles,
    cluster: Cluster,
    options: SolveOptions,
    clock: Clock,
    tuning: Tuning,
) -> Sizes:
    """Look at ascending sizes until they are slower, do not fit, or the time ends.

    On a size that is too small more is lost than by any search. So two sizes are looked at even where no time is left,
    and the one that should be the fastest on the line through them. Where no usual way fits at the smallest size, all
    sizes are worth a search.
    """
    sample_s = dict[int, float]()
    unseen: tuple[int, ...] = ()
    for number, size in enumerate(profiles.sizes):
        report_step(clock, f"estimating microbatches of {size}")
        if len(sample_s) > 1 and _looks_slower(size, profiles, sample_s, cluster, options, tuning):
            break
        if len(sample_s) > 1 and clock.passed:
            unseen = tuple(profiles.sizes[number:])
            break
        soon = clock.at_most(tuning.answer.alternatives_s)
        sample_s[size] = fastest_sample_s(profiles.at(size), cluster, options, soon, tuning)
        if sample_s[size] > min(sample_s.values()) or math.isinf(sample_s[size]):
            break

    if unseen:
        size = _fastest_on_the_line(unseen, profiles, sample_s, cluster, options, tuning)
        sample_s[size] = fastest_sample_s(profiles.at(size), cluster, options, clock, tuning)
        unseen = tuple(each for each in unseen if each != size)

    likely = min(sample_s, key=lambda size: sample_s[size])
    if math.isinf(sample_s[likely]):
        return Sizes(sample_s, tuple(profiles.sizes))

    smaller = [size for size in reversed(sample_s) if size < likely]
    wanted = [likely, *smaller][: tuning.fit.most_sizes]
    shared = _shared_size(likely, profiles, options)
    if shared is not None:
        wanted.insert(1, shared)
    return Sizes(sample_s, tuple(wanted), shared, unseen)


def fastest_sample_s(
    profile: Profile,
    cluster: Cluster,
    options: SolveOptions,
    clock: Clock,
    tuning: Tuning,
) -> float:
    """Return the seconds of a sample in the fastest of the usual ways; infinity where none fits."""
    costs = layer_costs_on(profile, cluster)
    budget = Budget(clock, tuning=tuning.budget)
    ways = usual_ways(options, costs, cluster, budget, tuning)
    fitting = [way.seconds_per_microbatch for way in ways if not way.over_memory_bytes]
    return min(fitting, default=math.inf) / (profile.microbatch_size or 1)


def least_sample_s(profile: Profile, cluster: Cluster, options: SolveOptions) -> float:
    """Return seconds of a sample that no plan is below: ranks that divide a layer take no less in all."""
    setting = setting_of(options, profile, cluster)
    seconds = balanced_s(layer_costs_on(profile, cluster), setting)
    return seconds / setting.microbatches / (profile.microbatch_size or 1)


def report_step(clock: Clock, step: str) -> None:
    """Tell who waits what is done now."""
    clock.progress.step = step


def _looks_slower(
    size: int,
    profiles: Profiles,
    sample_s: Mapping[int, float],
    cluster: Cluster,
    options: SolveOptions,
    tuning: Tuning,
) -> bool:
    """Return whether a size need not be estimated, by the line through the two sizes before it."""
    *_, before = sample_s
    seconds = _sample_s_on_the_line(size, profiles, list(sample_s), cluster, options, tuning)
    return seconds > sample_s[before] * (1 + tuning.fit.slower_size_share)


def _fastest_on_the_line(
    sizes: Sequence[int],
    profiles: Profiles,
    sample_s: Mapping[int, float],
    cluster: Cluster,
    options: SolveOptions,
    tuning: Tuning,
) -> int:
    """Return the size at which a sample takes least, by the line through the last two sizes that were looked at."""
    known = list(sample_s)

    def seconds(size: int) -> float:
        return _sample_s_on_the_line(size, profiles, known, cluster, options, tuning)

    return min(sizes, key=seconds)


def _sample_s_on_the_line(
    size: int,
    profiles: Profiles,
    known: Sequence[int],
    cluster: Cluster,
    options: SolveOptions,
    tuning: Tuning,
) -> float:
    """Return the seconds of a sample in the fastest usual way, not simulated, on the line through two known sizes."""
    one, other = known[-2:]
    profile = extended(profiles.at(one), profiles.at(other), size)
    return fastest_sample_s(profile, cluster, options, Clock.of(0.0), tuning)


def _shared_size(likely: int, profiles: Profiles, options: SolveOptions) -> int | None:
    """Return the size at which each rank that divides experts has `likely` samples; None without experts."""
    shared = likely * profiles.ranks
    has_experts = any("grouped_mm" in layer.op for layer in profiles.at(likely).layers)
    divides = (options.minibatch or 1) % shared == 0
    if has_experts and divides and shared > likely and len(profiles.sizes) > 1:
        return shared
    return None


def extended(one: Profile, other: Profile, size: int) -> Profile:
    """Return the profile for microbatches of so many samples, on the line through those for two smaller ones.

    But for what layers exchange: pipelines look faster than they are.
    """
    first = one.microbatch_size or 1
    second = other.microbatch_size or 1
    times = (size - second) / (second - first)
    layers = []
    for before, after in zip(one.layers, other.layers, strict=True):
        line = {}
        for name in ("forward_s", "backward_s", "saved_bytes", "workspace_bytes"):
            begin = getattr(before, name)
            end = getattr(after, name)
            line[name] = max(0, end + times * (end - begin))
        layers.append(after.model_copy(update=line))
    return other.model_copy(update={"layers": tuple(layers), "microbatch_size": size})
