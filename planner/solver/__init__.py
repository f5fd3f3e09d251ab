"""Find the fastest plan for a profile on a cluster: `solve`.

`find_plan` is the way from profile and cluster to plan. Every search takes a `Problem` and yields candidate plans;
`evaluate` prices, deepens and simulates them.

    problem/     the question: limits, budget, states of the cuts, bounds of the cost models; and the answer
    evaluate/    price, depth and simulation of a plan
    search/      chain/: exact search along an order of the layers; graph/: over all cuts of a graph, and bounds;
                 levels/: on clusters of several levels; integer/: integer programs, for constraints and mixed GPUs
    candidates/  alternatives that may wait less
    reference/   plans made without a planner
"""

from planner.solver.find_plan import solve

__all__ = ["solve"]
