"""Judge whether a run parts from its plan: windows of a run beside what its simulation has.

    a worker's ratio  = measured seconds of its computations / planned seconds of them
    a route's ratio   = measured seconds of its messages / planned seconds of them

Single windows are noisy: another process ran, a disk was slow. So only what lasts for several
windows in a row counts, and only what costs a share of a minibatch's time.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
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
    windows: int = 2

    # Computations of a worker, or messages of a route, for a median.
    fewest: int = 5


class Window(NamedTuple):
    """What some minibatches of a run show."""

    first: int  # minibatch
    end: int
    events: Sequence[Event]  # of those that were recorded
    samples_per_s: float  # of the whole window


class Parting(NamedTuple):
    """Ratios of what parted from the plan, since some minibatch."""

    since: int
    workers: Mapping[int, float]  # by rank
    routes: Mapping[tuple[int, int], float]  # by pair of ranks


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

        busy_s: defaultdict[int, float] = defaultdict(float)
        for (rank, _, _), each in seconds.items():
            busy_s[rank] += sum(each) / count
        return cls(
            minibatch_s=plan.predicted.seconds_per_minibatch,
            computations_s={key: typical(each) for key, each in seconds.items()},
            busy_s=busy_s,
            messages_s={key: typical(each) for key, each in messages.items()},
            per_minibatch={key: len(each) / count for key, each in messages.items()},
            by_sums=plan.lengths is not None,
        )


@dataclass
class _Subject:
    """What is known of one worker or route."""

    known: float = 1.0  # ratio to the plan, of which the user was told
    side: int = 0  # 1: slower than that, -1: faster
    windows: int = 0  # in a row
    since: int = 0
    newest: float = 1.0


@dataclass
class DriftJudge:
    """Looks at a run's windows, one after the other, and says when it parts from its plan.

    What was said once is known from then on: it is said again only when it changes.
    """

    expected: Expectation
    limits: DriftLimits = field(default_factory=DriftLimits)
    _subjects: dict[Hashable, _Subject] = field(default_factory=lambda: defaultdict(_Subject))

    def look(self, window: Window) -> Parting | None:
        """Return what has parted from the plan for long enough; None where nothing has."""
        certain = False
        for key, ratio, planned_s in self._ratios(window.events):
            subject = self._subjects[key]
            self._see(subject, ratio, planned_s, window.first)
            certain = certain or subject.windows >= self.limits.windows
        return self._told() if certain else None

    def _ratios(self, events: Sequence[Event]) -> Iterator[tuple[Hashable, float, float]]:
        """Yield workers and routes, their ratios, and their planned seconds per minibatch."""
        for rank, ratio in self._worker_ratios(events):
            yield rank, ratio, self.expected.busy_s[rank]
        found = list(self._transfers(events))
        for pair, route in route_ratios(found).items():
            planned_s = self._planned_s(pair)
            counts = planned_s >= self.limits.planned_share * self.expected.minibatch_s
            if counts and route.messages >= self.limits.fewest:
                yield pair, 1 / route.ratio, planned_s

    def _worker_ratios(self, events: Sequence[Event]) -> Iterator[tuple[int, float]]:
        found: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for event in of_units(events):
            planned_s = self.expected.computations_s.get(_computation(event), 0.0)
            if planned_s > 0:
                found[event.rank].append((event.end_s - event.start_s, planned_s))
        for rank, pairs in sorted(found.items()):
            if len(pairs) >= self.limits.fewest:
                yield rank, self._typical(pairs)

    def _typical(self, pairs: Sequence[tuple[float, float]]) -> float:
        """Return the ratio of (measured, planned) seconds; 1 where only some are slower."""
        if self.expected.by_sums:
            return sum(measured_s for measured_s, _ in pairs) / sum(s for _, s in pairs)
        ratios = sorted(measured_s / planned_s for measured_s, planned_s in pairs)
        most = ratios[int((1 - self.limits.slower_share) * len(ratios))]
        middle = weighted_median(
            (measured_s / planned_s, planned_s) for measured_s, planned_s in pairs
        )
        return 1.0 if middle > 1 and most < (1 + middle) / 2 else middle

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

    def _see(self, subject: _Subject, ratio: float, planned_s: float, first: int) -> None:
        change = ratio / subject.known
        side = 0
        if change >= self.limits.ratio:
            side = 1
        elif change <= 1 / self.limits.ratio:
            side = -1
        difference_s = abs(ratio - subject.known) * planned_s
        if difference_s < self.limits.cost_share * self.expected.minibatch_s:
            side = 0

        if side == 0 or side != subject.side:
            subject.windows = 0
            subject.since = first
        subject.side = side
        subject.windows += side != 0
        subject.newest = ratio

    def _told(self) -> Parting:
        """Return all that has parted for long enough, which is known from now on."""
        parted = {
            key: subject
            for key, subject in self._subjects.items()
            if subject.windows >= self.limits.windows
        }
        for subject in parted.values():
            subject.known = subject.newest
            subject.windows = 0
        return Parting(
            since=min(subject.since for subject in parted.values()),
            workers={key: each.newest for key, each in parted.items() if isinstance(key, int)},
            routes={key: each.newest for key, each in parted.items() if isinstance(key, tuple)},
        )


def _computation(event: Event) -> _Computation:
    return event.rank, event.stage, event.kind


def _route(message: Message) -> _Route:
    return message.kind, message.sender, message.receiver, message.stages
