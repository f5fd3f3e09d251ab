"""Find the fastest plan for a profile on a cluster.

`solve.solve` is the one way from a question to its answer, which `planner.solve` calls. `find_plan`
searches for the fastest plan under one schedule, and `fit` asks `solve` about several sizes of
microbatches and several numbers of GPUs.

    solve -> find_plan -> answer        the degrees of divided layers, and the places to cut
                            portfolio   attempts, proposers, evaluation in a pool, improvement

    problem/       the question: limits, budget, states of the cuts, bounds of the cost models; and the answer
    evaluate/      price, depth and simulation of a plan
    search/        chain/: exact search along the profile's order; levels/: on clusters of several levels;
                   integer/: integer programs, for mixed GPUs and to check the search
    propose/       candidate plans: regular ones, exact searches, mixed GPUs, interleaved, integer programs
    improve/       local search from the best candidates
    choose/        cuts that people make by hand, and which of nearly equal plans is the answer
    alternatives/ what competes with a search's plan or stands beside it: schedules, usual ways,
    fewer hosts
    tuning/        how far, how long and how precisely all of these look: one record, which the question carries
    sizes/         how many samples a minibatch and a microbatch have, where nobody says
"""

from planner.solver.find_plan import search_plan

__all__ = ["search_plan"]
