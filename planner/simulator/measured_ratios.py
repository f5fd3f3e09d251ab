"""Compare computations and messages of a run with those of its simulation, one by one.

A pause of the host is no property of a device or a link, so what counts are medians.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

from planner.formats.timeline import Event

_MESSAGES = {"receive_activation": "send_activation", "receive_gradient": "send_gradient"}


class Message(NamedTuple):
    """What tells a message from all others of a run."""

    kind: str  # of its sending
    sender: int
    receiver: int
    stages: tuple[int, int]
    minibatch: int
    microbatch: int

    @property
    def pair(self) -> tuple[int, int]:
        """Both workers, the one of the lower rank first."""
        return min(self.sender, self.receiver), max(self.sender, self.receiver)


class Transfer(NamedTuple):
    """The seconds of a message, planned and measured."""

    message: Message
    planned_s: float
    measured_s: float


class RouteRatio(NamedTuple):
    """Planned seconds of the messages between two workers, relative to the measured ones."""

    ratio: float
    messages: int


def computations(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the computations as a worker notes them: with the recomputation before, or the
    all-gather after them.
    """
    events = list(events)
    gathered_s = {}
    for event in events:
        if event.kind == "all_gather":
            gathered_s[event.rank, event.stage, event.minibatch] = event.end_s

    began_s: dict[tuple[int, ...], float] = {}
    for event in events:
        unit = event.rank, event.stage, event.minibatch, event.microbatch
        if event.kind == "recompute":
            began_s[unit] = event.start_s
        elif event.kind in ("backward", "backward_input") and unit in began_s:
            yield event._replace(start_s=began_s.pop(unit))
        elif event.kind == "update":
            yield event._replace(end_s=gathered_s.get(unit[:3], event.end_s))
        elif event.lane == "compute":
            yield event


def of_units(events: Iterable[Event]) -> Iterator[Event]:
    """Yield forwards and backwards; an update also waits for other stages' gradients."""
    for event in computations(events):
        if event.kind != "update":
            yield event


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Return the value at half of the weight; of (value, weight)."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    raise AssertionError("there are no values")


def transfers(events: Iterable[Event], *, waited: bool) -> Iterator[tuple[Message, float]]:
    """Yield messages between workers, and the seconds from the sending to the arrival.

    Args:
        events: of a run; of a message whose sending or receipt is not among them, nothing is known.
        waited: leave out those that may have arrived before their receiver looked for them.
    """
    events = list(events)
    sent_s = {_message(event): event.start_s for event in events if event.lane == "send"}
    for event in events:
        if event.kind not in _MESSAGES:
            continue
        message = _message(event)
        if message not in sent_s or message.sender == message.receiver:
            continue
        seconds = event.end_s - sent_s[message]
        waited_s = event.end_s - event.start_s
        if seconds > 0 and (not waited or waited_s >= seconds / 2):
            yield message, seconds


def route_ratios(transfers: Iterable[Transfer]) -> dict[tuple[int, int], RouteRatio]:
    """Return the ratio for each pair of workers, by their ranks.

    What the clocks of two hosts differ by makes messages one way longer and those the other way as
    much shorter. So the medians of both ways are added up before they are compared.
    """
    by_pair: defaultdict[tuple[int, int], dict[int, list[Transfer]]] = defaultdict(dict)
    for transfer in transfers:
        message = transfer.message
        by_pair[message.pair].setdefault(message.sender, []).append(transfer)

    ratios = {}
    for pair, ways in by_pair.items():
        planned_s = 0.0
        measured_s = 0.0
        count = 0
        for way in ways.values():
            planned_s += median(transfer.planned_s for transfer in way)
            measured_s += median(transfer.measured_s for transfer in way)
            count += len(way)

        if measured_s > 0:
            ratios[pair] = RouteRatio(planned_s / measured_s, count)

    return ratios


def _message(event: Event) -> Message:
    assert event.peer_rank is not None
    assert event.peer_stage is not None
    kind = str(event.kind)
    if event.lane == "receive":
        kind = _MESSAGES[kind]
        return Message(
            kind,
            event.peer_rank,
            event.rank,
            (event.peer_stage, event.stage),
            event.minibatch,
            event.microbatch,
        )

    return Message(
        kind,
        event.rank,
        event.peer_rank,
        (event.stage, event.peer_stage),
        event.minibatch,
        event.microbatch,
    )
