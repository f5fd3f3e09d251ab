"""Find the fastest plan for a profile on a cluster: `solve`.

`find_plan` is the way from profile and cluster to plan: the steps that settle what a search cannot know, and the search
that suits the problem (`methods`). Every step takes a `Problem` and returns an answer, `Found`.

    problem/   the question: limits, budget, states of the cuts, bounds of the cost models; and the answer
    evaluate/  price, depth and simulation of a plan
    search/    chain/: exact search along the profile's order; levels/: on clusters of several levels;
               integer/: integer programs, for mixed GPUs and to check the search
    choose/    plans that take no search, alternatives that may wait less, local search from the best plans
"""

from planner.solver.find_plan import solve

__all__ = ["solve"]
