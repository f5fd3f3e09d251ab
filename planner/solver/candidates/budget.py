"""What one search simulates: as many instructions as make some seconds, and none when time is up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from planner.cost.layer_costs import Candidate
from planner.simulator.pipeline_costs import PipelineCosts
from planner.simulator.steady_time import steady_s
from planner.solver.candidates.deadline import NO_HURRY, Deadline

MOST_INSTRUCTIONS = 2**19  # of all workers in all simulations of one search: some seconds


@dataclass
class Tally:
    """What was simulated in one search, and what still may be.

    Attributes:
        deadline: of the search: whatever is being simulated then has no answer.
        left: instructions that may still be executed.
        count: candidates that were simulated, at one depth or several.
        exhausted: nothing was left out for want of instructions or time.
        seen: the candidates.
    """

    deadline: Deadline = NO_HURRY
    left: float = field(default_factory=lambda: MOST_INSTRUCTIONS)
    count: int = 0
    exhausted: bool = True
    seen: set[tuple[Candidate, ...]] = field(default_factory=set)

    @classmethod
    def unlimited(cls) -> Tally:
        """For a single answer, which takes what it takes."""
        return cls(left=math.inf)

    @property
    def over(self) -> bool:
        """Whether what may be simulated is used up, or the time."""
        return self.left <= 0 or self.deadline.passed

    def steady_s(self, pipeline: PipelineCosts, *, needed: bool = False) -> float | None:
        """Seconds per minibatch in the steady state; infinite for a deadlock, None where there is no answer in time.

        `needed`: there is nothing else to go by, so that only the deadline counts.
        """
        if self.deadline.passed or (self.left <= 0 and not needed):
            self.exhausted = False
            return None
        room, executed = math.inf if needed else self.left, 0

        def stop(instructions: int) -> bool:
            nonlocal executed
            executed = instructions
            return instructions > room or self.deadline.passed

        seconds = steady_s(pipeline, stop)
        self.left -= executed
        self.exhausted &= seconds is not None
        return seconds
