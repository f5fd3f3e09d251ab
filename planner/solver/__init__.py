"""Find the fastest plan for a profile on a cluster: `solve`.

`find_plan` is the way from profile and cluster to plan. Every search takes a `Problem` (`problem`) and yields candidate
plans; `candidates.evaluation` prices, deepens and simulates them.

    bounds/      what the searches know about each cost model
    chain/       exact search over the cuts along an order of the layers
    graph/       search over all cuts of a branching model, and bounds
    levels/      search on clusters of several levels
    integer/     integer programs, for constraints and GPUs of several kinds
    candidates/  evaluation of candidate plans, and alternatives that may wait less
    reference/   plans made without a planner
"""

from planner.solver.find_plan import solve

__all__ = ["solve"]
