"""What a worker notes while it runs: losses and times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class Completion(NamedTuple):
    """The end of a backward, and how long the worker had computed until then."""

    ended_s: float
    busy_s: float


@dataclass
class WorkerLog:
    """Losses and times that a worker saw. Only differences of times have a meaning."""

    losses: list[tuple[int, float]] = field(default_factory=list)  # minibatch, its (part of the) loss
    completions: deque[Completion] = field(default_factory=lambda: deque(maxlen=100_000))
    busy_s: float = 0.0
    paused_s: float = 0.0  # spent on what is no training
