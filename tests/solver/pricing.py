"""The problem of pricing plans, each of which takes what it takes."""

from __future__ import annotations

from planner.formats.cluster import Cluster
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.solver.clock import Clock
from planner.solver.problem.problem import Problem
from planner.solver.request import Request


def pricing(model: Profile, cluster: Cluster, options: SolveOptions) -> Problem:
    request = Request(model, cluster, options, Clock())
    return request.problem(request.unlimited_budget())
