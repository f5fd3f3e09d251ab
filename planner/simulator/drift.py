"""Judge whether a run parts from its plan: windows of a run beside what its simulation has.

    a worker's ratio  = measured seconds of its computations / planned seconds of them
    a route's ratio   = measured seconds of its messages / planned seconds of them

Single windows are noisy: another process ran, a disk was slow. So only what lasts for several
windows in a row counts, and only what costs a share of a minibatch's time.

A run is looked at in the middle and at the end of a window. How many windows it takes depends on
the noise of the worker or route in the halves before:

    noise  = root mean square of ln(ratio) - median of ln(ratio), of the halves before
    clear  : |ln(ratio) - median of ln(ratio) before| >= 4 noise, in each half of the row

What is clear is certain after a window and a quarter, and nothing else can be waited for. All the
rest takes two windows, and is certain enough for a move after two more.
"""

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median
from types import MappingProxyType
from typing import NamedTuple

from planner.formats.plan import Plan
from planner.formats.timeline import Event
from planner.simulator.measured_ratios import (
    Message,
    Transfer,
    of_units,
    route_ratios,
    transfers,
    weighted_median,
)
from planner.simulator.simulate_plan import default_minibatches, simulate

_MOST_UNITS = 4000  # of work that are simulated before a run: a fraction of a second
LOOKS = 2  # at a run in each window, at halves of it
_REMEMBERED = 20 * LOOKS  # halves, whose noise counts
_MOST_S = 5.0  # for plans of which two minibatches are more
_Computation = tuple[int, int, str]  # rank, stage, kind
_Route = tuple[str, int, int, tuple[int, int]]  # kind, sender, receiver, stages


@dataclass(frozen=True)
class DriftLimits:
    """What counts as parting from the plan."""

    # Seconds of a worker or a route, relative to what is known of them. Another run of the same
    # plan on a machine with other work differs by less.
    ratio: float = 1.25

    # Share of the computations by which a worker must be slower, by half as much at least. What a
    # busy host slows down are some of them.
    slower_share: float = 0.75

    # Share of a minibatch's time that the difference must make on one worker or route. Messages of
    # some microseconds take twice as long whenever a host is busy.
    cost_share: float = 0.05

    # Share of a minibatch's time that the plan expects of a route's messages, at least. Smaller
    # ones take as long as their receiver needs to wake up, which is no rate of a link.
    planned_share: float = 0.005

    # Windows in a row for which it must last.
    windows: float = 2.0

    # Windows in a row where it is clear beside the noise: a quarter of one, and the next.
    clear_windows: float = 1.25

    # Difference that is clear, in units of the noise of the windows before, which are so many at
    # least and count as noisy as this at least.
    clear_noises: float = 4.0
    fewest_before: int = 3
    least_noise: float = 0.05

    # Computations of a worker, or messages of a route, for a median.
    fewest: int = 5


class Window(NamedTuple):
    """What the minibatches of a window, or of a part of one, show."""

    first: int  # minibatch
    end: int
    events: Sequence[Event]  # of those that were recorded
    samples_per_s: float  # of all of them
    # by rank, what workers that the plan leaves out measured: their seconds relative to the plan's
    left_out: Mapping[int, float] = MappingProxyType({})


class Parting(NamedTuple):
    """Ratios of what parted from the plan, since some minibatch."""

    since: int
    workers: Mapping[int, float]  # by rank
    routes: Mapping[tuple[int, int], float]  # by pair of ranks
    clear: bool = False  # beside the noise of the windows before


class _Seen(NamedTuple):
    """What a window shows of a worker or route."""

    key: Hashable
    ratio: float  # 1 where only some computations are slower
    middle: float  # the median of all
    planned_s: float  # per minibatch


@dataclass(frozen=True)
class Expectation:
    """Seconds that a plan's simulation has, of each kind of computation and of each message."""

    minibatch_s: float
    computations_s: Mapping[_Computation, float]
    busy_s: Mapping[int, float]  # of computations per minibatch, by rank
    messages_s: Mapping[_Route, float]
    per_minibatch: Mapping[_Route, float]  # messages
    # Microbatches of different lengths are compared by their sums, because single ones have no
    # expected time.
    by_sums: bool

    @classmethod
    def of(cls, plan: Plan) -> "Expectation":
        """Simulate some minibatches of a plan; raise InputError where that takes too long."""
        units = plan.microbatches * len(plan.stages)
        few = max(2 * math.lcm(*plan.replicas), _MOST_UNITS // units)
        count = min(default_minibatches(plan), few)
        events = list(simulate(plan, count, time_limit_s=_MOST_S).events.rows())

        typical = median if plan.lengths is None else fmean
        seconds: defaultdict[_Computation, list[float]] = defaultdict(list)
        for event in of_units(events):
            seconds[_computation(event)].append(event.end_s - event.start_s)
        messages: defaultdict[_Route, list[float]] = defaultdict(list)
        for message, message_s in transfers(events, waited=False):
            messages[_route(message)].append(message_s)

        return cls(
            minibatch_s=plan.predicted.seconds_per_minibatch,
            computations_s={key: typical(each) for key, each in seconds.items()},
            busy_s=_busy_s(seconds, count),
            messages_s={key: typical(each) for key, each in messages.items()},
            per_minibatch={key: len(each) / count for key, each in messages.items()},
            by_sums=plan.lengths is not None,
        )


def _busy_s(seconds: Mapping[_Computation, Sequence[float]], minibatches: int) -> dict[int, float]:
    """Return the seconds per minibatch that each rank computes."""
    busy_s: defaultdict[int, float] = defaultdict(float)
    for (rank, _, _), each in seconds.items():
        busy_s[rank] += sum(each) / minibatches
    return busy_s


@dataclass
class _Subject:
    """What is known of one worker or route."""

    known: float = 1.0  # ratio to the plan, of which the user was told
    side: int = 0  # 1: slower than that, -1: faster
    windows: float = 0.0  # in a row
    clear: bool = False  # in all of them
    since: int = 0
    newest: float = 1.0
    # ln(ratio) of each look at the row, and of those before it
    row: list[float] = field(default_factory=list)
    before: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def end_row(self) -> None:
        """Count the windows of the row as noise: what was seen in them is gone."""
        self.before.extend(self.row)
        self.row.clear()
        self.windows = 0.0

    def noises(self, ratio: float, least: float) -> float:
        """Return the difference from the windows before, in units of their noise."""
        usual = median(self.before)
        noise = math.sqrt(fmean((each - usual) ** 2 for each in self.before))
        return abs(math.log(ratio) - usual) / max(noise, least)


@dataclass
class DriftJudge:
    """Looks at a run's windows, one after the other, and says when it parts from its plan.

    What was said once is known from then on: it is said again only when it changes.

    Attributes:
        expected: of the plan.
        limits: what counts as parting from it.
        share: of a window, in each look.
    """

    expected: Expectation
    limits: DriftLimits = field(default_factory=DriftLimits)
    share: float = 1.0
    _subjects: dict[Hashable, _Subject] = field(default_factory=lambda: defaultdict(_Subject))

    def look(self, window: Window) -> Parting | None:
        """Return what has parted from the plan for long enough; None where nothing has."""
        middle = (window.first + window.end) // 2
        late = {seen.key: seen for seen in self._later(window, middle)}
        certain = False
        for seen in chain(self._ratios(window.events), self._left_out(window)):
            subject = self._subjects[seen.key]
            half = late.get(seen.key, seen)
            if self._side(subject, seen) != 0:
                self._see(subject, seen, window.first, self.share)
            elif self._side(subject, half) != 0:  # disturbances begin within a window
                subject.end_row()
                self._see(subject, half, middle, self.share / 2)
            else:
                subject.end_row()
                subject.before.append(math.log(seen.middle))
            certain = certain or self._is_certain(subject)

        return self._told() if certain else None

    def _later(self, window: Window, middle: int) -> Iterator[_Seen]:
        """Yield what the later half of a window shows, if its last quarter shows any change."""
        later = [event for event in window.events if event.minibatch >= middle]
        last = (middle + window.end) // 2
        newest = [event for event in later if event.minibatch >= last]
        if any(self._side(self._subjects[seen.key], seen) for seen in self._ratios(newest)):
            yield from self._ratios(later)

    def _ratios(self, events: Sequence[Event]) -> Iterator[_Seen]:
        """Yield what some minibatches show of workers and routes."""
        for rank, ratio, middle in self._worker_ratios(events):
            yield _Seen(rank, ratio, middle, self.expected.busy_s[rank])
        found = list(self._transfers(events))
        for pair, route in route_ratios(found).items():
            planned_s = self._planned_s(pair)
            counts = planned_s >= self.limits.planned_share * self.expected.minibatch_s
            if counts and route.messages >= self.limits.fewest:
                yield _Seen(pair, 1 / route.ratio, 1 / route.ratio, planned_s)

    def _left_out(self, window: Window) -> Iterator[_Seen]:
        """Yield what workers without stages measured: a plan may fill all of their time."""
        for rank, ratio in sorted(window.left_out.items()):
            yield _Seen(rank, ratio, ratio, self.expected.minibatch_s)

    def _worker_ratios(self, events: Sequence[Event]) -> Iterator[tuple[int, float, float]]:
        found: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for event in of_units(events):
            planned_s = self.expected.computations_s.get(_computation(event), 0.0)
            if planned_s > 0:
                found[event.rank].append((event.end_s - event.start_s, planned_s))
        for rank, pairs in sorted(found.items()):
            if len(pairs) >= self.limits.fewest:
                yield rank, *self._typical(pairs)

    def _typical(self, pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Return the ratio of (measured, planned) seconds, 1 where only some are slower; and its
        median.
        """
        if self.expected.by_sums:
            ratio = sum(measured_s for measured_s, _ in pairs) / sum(s for _, s in pairs)
            return ratio, ratio

        ratios = sorted(measured_s / planned_s for measured_s, planned_s in pairs)
        most = ratios[int((1 - self.limits.slower_share) * len(ratios))]
        middle = weighted_median(
            (measured_s / planned_s, planned_s) for measured_s, planned_s in pairs
        )
        if middle > 1 and most < (1 + middle) / 2:
            return 1.0, middle
        return middle, middle

    def _transfers(self, events: Sequence[Event]) -> Iterator[Transfer]:
        for message, measured_s in transfers(events, waited=True):
            planned_s = self.expected.messages_s.get(_route(message), 0.0)
            if planned_s > 0:
                yield Transfer(message, planned_s, measured_s)

    def _planned_s(self, pair: tuple[int, int]) -> float:
        """Return the planned seconds of a pair's messages per minibatch, of the busier way."""
        ways: defaultdict[int, float] = defaultdict(float)
        for route, seconds in self.expected.messages_s.items():
            _, sender, receiver, _ = route
            if {sender, receiver} == set(pair):
                ways[sender] += seconds * self.expected.per_minibatch[route]
        return max(ways.values(), default=0.0)

    def _side(self, subject: _Subject, seen: _Seen) -> int:
        """Return whether a worker or route is slower (1) or faster (-1) than known; 0: neither."""
        difference_s = abs(seen.ratio - subject.known) * seen.planned_s
        if difference_s < self.limits.cost_share * self.expected.minibatch_s:
            return 0
        change = seen.ratio / subject.known
        if change >= self.limits.ratio:
            return 1
        if change <= 1 / self.limits.ratio:
            return -1
        return 0

    def _see(self, subject: _Subject, seen: _Seen, first: int, share: float) -> None:
        """Take note of minibatches from `first` on, a share of a window."""
        side = self._side(subject, seen)
        if side != subject.side or subject.windows == 0:
            subject.end_row()
            subject.since = first
            subject.clear = True

        subject.side = side
        subject.windows += share
        subject.clear = subject.clear and self._is_clear(subject, seen)
        subject.newest = seen.ratio
        subject.row.append(math.log(seen.middle))

    def _is_clear(self, subject: _Subject, seen: _Seen) -> bool:
        limits = self.limits
        if self.share * len(subject.before) < limits.fewest_before:
            return False
        return subject.noises(seen.ratio, limits.least_noise) >= limits.clear_noises

    def _is_certain(self, subject: _Subject) -> bool:
        limits = self.limits
        return subject.windows >= (limits.clear_windows if subject.clear else limits.windows)

    def _told(self) -> Parting:
        """Return all that has parted for long enough, which is known from now on."""
        parted = {key: each for key, each in self._subjects.items() if self._is_certain(each)}
        clear = any(each.clear for each in parted.values())
        for subject in parted.values():
            subject.known = subject.newest
            subject.windows = 0.0
            subject.row.clear()
            subject.before.clear()

        return Parting(
            since=min(subject.since for subject in parted.values()),
            workers={key: each.newest for key, each in parted.items() if isinstance(key, int)},
            routes={key: each.newest for key, each in parted.items() if isinstance(key, tuple)},
            clear=clear,
        )


def _computation(event: Event) -> _Computation:
    return event.rank, event.stage, event.kind


def _route(message: Message) -> _Route:
    return message.kind, message.sender, message.receiver, message.stages
