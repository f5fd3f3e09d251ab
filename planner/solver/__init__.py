"""Find the fastest plan for a profile on a cluster.

`solve.solve` is the one way from a request to its answer, which `planner.solve` calls. `find_plan`
searches for the fastest plan under one schedule, and `fit` asks `solve` about several sizes of
microbatches and several numbers of GPUs.

    solve       the schedules, and what stands beside a plan
    find_plan   one schedule: the degrees of divided layers, and the places to cut
    portfolio   attempts, proposers, evaluation in a pool, improvement

    request.py     what is asked: profile, cluster, options, clock; and the problem that it makes
    problem/       the problem: limits, budget, states of the cuts, bounds of the cost models
    by_hand.py     stages that people choose by hand
    evaluate/      price, depth and simulation of a plan
    search/        chain/: exact search along the profile's order; levels/: on clusters of several
                   levels; integer/: integer programs, for mixed GPUs and to check the search
    propose/       candidate plans: regular ones, exact searches, mixed GPUs, interleaved, integer
                   programs
    improve/       local search from the best candidates, and the least late of nearly equal ones
    alternatives/  what competes with a search's plan or stands beside it: schedules, usual ways,
                   fewer hosts
    sizes/         how many samples a minibatch and a microbatch have, where nobody says
    tuning/        how far, how long and how precisely all of these look: one record
"""

from planner.solver.find_plan import search_plan

__all__ = ["search_plan"]
