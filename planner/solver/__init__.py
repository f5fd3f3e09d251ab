"""Find the fastest plan for a profile on a cluster.

`solve.solve` is the one way from a question to its answer, which `planner.solve` calls. `find_plan` searches for the
fastest plan under one schedule: the steps that settle what a search cannot know, and the search that suits the problem
(`methods`). Every step takes a `Problem` and returns an answer, `Found`. `fit` asks `solve` about several sizes of
microbatches and several numbers of GPUs.

    problem/       the question: limits, budget, states of the cuts, bounds of the cost models; and the answer
    evaluate/      price, depth and simulation of a plan
    search/        chain/: exact search along the profile's order; levels/: on clusters of several levels;
                   integer/: integer programs, for mixed GPUs and to check the search
    choose/        plans that take no search, plans that may wait less, local search from the best plans
    alternatives/  what competes with a search's plan or stands beside it: schedules, usual ways, fewer hosts
    sizes/         how many samples a minibatch and a microbatch have, where nobody says
"""

from planner.solver.find_plan import search_plan

__all__ = ["search_plan"]
