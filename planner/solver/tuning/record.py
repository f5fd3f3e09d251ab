"""The record of all tuned numbers, by the rooms of the solver that use them.

`solve` and `fit` take a record, and the problem carries it: functions that have the problem read
their numbers there, and others get the number or the record as an argument. What is exact (rows of
arrays, units, rounding) is a constant beside its code instead: `tests/test_rules.py` lists these.
"""

from dataclasses import dataclass, field

from planner.solver.tuning.answers import (
    AnswerTuning,
    ClockTuning,
    ExplanationTuning,
    FitTuning,
    LinksTuning,
    MeasuredTuning,
    WhatIfTuning,
)
from planner.solver.tuning.evaluation import (
    BudgetTuning,
    DepthTuning,
    EvaluateTuning,
    ImproveTuning,
    PortfolioTuning,
)
from planner.solver.tuning.searches import (
    ArrayTuning,
    BoundTuning,
    BranchesTuning,
    ChainTuning,
    ColumnsTuning,
    IntegerTuning,
    InterleavedTuning,
    LevelsTuning,
    MixedTuning,
    ProposeTuning,
    RestrictedTuning,
    SynchronousTuning,
    WaitingTuning,
)


@dataclass(frozen=True)
class Tuning:
    """How far searches look, how long, and how near counts as equal."""

    clock: ClockTuning = field(default_factory=ClockTuning)
    answer: AnswerTuning = field(default_factory=AnswerTuning)
    fit: FitTuning = field(default_factory=FitTuning)
    explanation: ExplanationTuning = field(default_factory=ExplanationTuning)
    what_if: WhatIfTuning = field(default_factory=WhatIfTuning)
    links: LinksTuning = field(default_factory=LinksTuning)
    measured: MeasuredTuning = field(default_factory=MeasuredTuning)

    budget: BudgetTuning = field(default_factory=BudgetTuning)
    evaluate: EvaluateTuning = field(default_factory=EvaluateTuning)
    depths: DepthTuning = field(default_factory=DepthTuning)
    portfolio: PortfolioTuning = field(default_factory=PortfolioTuning)
    improve: ImproveTuning = field(default_factory=ImproveTuning)

    arrays: ArrayTuning = field(default_factory=ArrayTuning)
    bounds: BoundTuning = field(default_factory=BoundTuning)
    chain: ChainTuning = field(default_factory=ChainTuning)
    branches: BranchesTuning = field(default_factory=BranchesTuning)
    synchronous: SynchronousTuning = field(default_factory=SynchronousTuning)
    interleaved: InterleavedTuning = field(default_factory=InterleavedTuning)
    levels: LevelsTuning = field(default_factory=LevelsTuning)
    columns: ColumnsTuning = field(default_factory=ColumnsTuning)
    restricted: RestrictedTuning = field(default_factory=RestrictedTuning)
    waiting: WaitingTuning = field(default_factory=WaitingTuning)
    mixed: MixedTuning = field(default_factory=MixedTuning)
    propose: ProposeTuning = field(default_factory=ProposeTuning)
    integer: IntegerTuning = field(default_factory=IntegerTuning)


# What every problem carries unless it is told otherwise.
STANDARD = Tuning()
