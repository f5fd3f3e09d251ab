"""What the simulations of one question may spend, and what they know so far."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planner.cost.candidate import Candidate
from planner.simulator.pipeline_costs import PipelineCosts
from planner.simulator.steady_time import steady_s
from planner.solver.clock import Clock
from planner.solver.tuning.evaluation import BudgetTuning
from planner.solver.tuning.record import STANDARD

if TYPE_CHECKING:
    from planner.solver.problem.result import Evaluation


@dataclass
class Tally:
    """What all budgets of a question count together."""

    simulated: int = 0


@dataclass
class Budget:
    """What one search may spend, and what it has spent.

    Instructions are counted rather than seconds, so that the same problem has the same answer on
    any machine.
    """

    # when it passes, the simulation in progress ends without an answer
    clock: Clock = field(default_factory=Clock)
    most: float | None = None  # instructions of all simulations; by default those of `tuning`
    tuning: BudgetTuning = STANDARD.budget
    # whether instructions end simulations, too, whose time is needed
    strict: bool = False
    # whether every candidate was looked at; False if instructions or time ran out
    exhausted: bool = True
    # what came of those simulated
    seen: dict[tuple[Candidate, ...], Evaluation] = field(default_factory=dict)
    # seconds of those simulated, by `PipelineCosts.key`
    known: dict[Hashable, float] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    left: float = field(init=False)  # instructions that may still be simulated
    # when searches end, so that some time is left to simulate what they found
    searching: Clock = field(init=False)

    def __post_init__(self) -> None:
        if self.most is None:
            self.left = self.tuning.most_instructions
        else:
            self.left = self.most
        self.searching = self.clock.part(self.tuning.search_share)

    @classmethod
    def unlimited(
        cls,
        clock: Clock | None = None,
        tuning: BudgetTuning = STANDARD.budget,
    ) -> Budget:
        """Return a budget for pricing single plans, each of which takes what it takes until the
        deadline.
        """
        return cls(clock or Clock(), math.inf, tuning)

    @classmethod
    def last(cls, clock: Clock, seconds: float, tuning: BudgetTuning) -> Budget:
        """Return the budget for the last simulations of an answer: so many seconds, even where the
        clock has passed.
        """
        return cls.unlimited(clock.at_least(seconds).at_most(seconds), tuning)

    @classmethod
    def counted(cls, clock: Clock, most: float, seconds: float, tuning: BudgetTuning) -> Budget:
        """Return the budget for so many instructions, which are the same on any machine, even where
        the clock has passed; the seconds end them on a machine that is far too busy.
        """
        return cls(clock.at_least(seconds).at_most(seconds), most, tuning, strict=True)

    def apart(self, most: float | None = None) -> Budget:
        """Return a budget of its own for the same question, which knows what this one does, and
        counts with it.

        Args:
            most: instructions that may be simulated; by default those of `tuning`.
        """
        return Budget(self.clock, most, self.tuning, known=self.known, tally=self.tally)

    @property
    def count(self) -> int:
        """Candidate plans that were simulated, at one depth or several."""
        return self.tally.simulated

    def keep(self, evaluation: Evaluation) -> None:
        """Count a plan that was simulated, and remember what came of it."""
        self.tally.simulated += 1
        self.seen[evaluation.stages] = evaluation

    @property
    def over(self) -> bool:
        """Whether the instructions or the time are used up."""
        return self.left <= 0 or self.clock.passed

    def steady_s(
        self, pipeline: PipelineCosts, *, needed: bool = False, hopeless_s: float = math.inf
    ) -> float | None:
        """Simulate a pipeline, and return its seconds per minibatch in the steady state; infinity
        for a deadlock.

        Where a time is `needed`, only the deadline ends the simulation, unless the budget is
        strict. Above `hopeless_s` a rough time does. Return None if the budget ends before the
        simulation does.
        """
        key = pipeline.key
        if key in self.known:
            return self.known[key]

        unlimited = needed and not self.strict
        if self.clock.passed or (self.left <= 0 and not unlimited):
            self.exhausted = False
            return None

        room = math.inf if unlimited else self.left
        executed = 0

        def stop(instructions: int) -> bool:
            nonlocal executed
            executed = instructions
            return instructions > room or self.clock.passed

        seconds = steady_s(pipeline, stop, hopeless_s)
        self.left -= executed
        if seconds is None:
            self.exhausted = False
        elif seconds <= hopeless_s:
            self.known[key] = seconds

        return seconds
