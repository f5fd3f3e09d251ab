"""The ways to run stages: whether the optimizer's state is sharded, and which layers recompute.

Searches ask for many stages at once, and every way of every stage is a row: every choice of
recomputing layers that some memory limit could make the best one (`planner.cost.recomputation`),
the quickest first.
"""

from planner.solver.search.chain.variants.best import QuickestVariants
from planner.solver.search.chain.variants.space import StageVariants, Variants, numbered, taken
from planner.solver.search.chain.variants.stages import PartsOf, Stages, StageTables, stages_on

__all__ = [
    "PartsOf",
    "QuickestVariants",
    "StageTables",
    "StageVariants",
    "Stages",
    "Variants",
    "numbered",
    "stages_on",
    "taken",
]
