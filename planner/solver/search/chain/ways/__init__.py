"""The ways to run stages: whether the optimizer's state is sharded, and which layers recompute.

Searches ask for many stages at once, and every way of every stage is a row: every choice of
recomputing layers that some memory limit could make the best one (`planner.cost.recomputation`),
the quickest first.
"""

from planner.solver.search.chain.ways.best import BestWays
from planner.solver.search.chain.ways.rows import numbered, taken
from planner.solver.search.chain.ways.space import Ways, WaysOf
from planner.solver.search.chain.ways.stages import PartsOf, Stages, StageTables, stages_on

__all__ = [
    "BestWays",
    "PartsOf",
    "StageTables",
    "Stages",
    "Ways",
    "WaysOf",
    "numbered",
    "stages_on",
    "taken",
]
