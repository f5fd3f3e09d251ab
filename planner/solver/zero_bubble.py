"""Plans for zb-h1: the cut that is best for 1f1b-flush, at the pace of its own streams."""

from __future__ import annotations

from dataclasses import replace

from planner.cost import DIVIDED
from planner.pricing import Candidate, Price
from planner.schedule.streams import Channel, PipelineShape
from planner.simulator.pipeline import simulate
from planner.solver.depth import pipeline_times
from planner.solver.methods import Found
from planner.solver.request import Request
from planner.topology import rank_ranges

MOST_COMPUTATIONS = 2**13  # forwards of a minibatch on all workers, beyond which simulating takes too long
_MINIBATCHES = 3


def solve_zero_bubble(request: Request, drained: Found) -> tuple[Found, Price]:
    """The plan with the stages of `drained`, the best for 1f1b-flush, and a time that no plan is below.

    What the weights' gradients fill of the bubble depends on all stages together, which no walk along the layers adds
    up. What the cut must do is the same under both schedules: leave no stage with more work than the others.
    """
    assert request.schedule in DIVIDED
    cost = _with_waits(request, drained, request.priced(drained.stages))
    layers = request.ledger.profile.layers
    everything = request.ledger.work(Candidate(frozenset(), frozenset(range(len(layers))), 1))
    fastest = max((kind.speed for kind in request.cluster.kinds), default=1.0)
    once_s = float(everything.forward_s + everything.backward_s) / fastest
    bound_s = request.microbatches * once_s / request.cluster.gpus
    return replace(drained, bound_s=min(bound_s, cost.seconds_per_minibatch)), cost


def _with_waits(request: Request, found: Found, price: Price) -> Price:
    """`price` at the pace of the simulated streams; that of the formula where these are too long."""
    microbatches, stages = request.microbatches, found.stages
    if len(stages) * microbatches > MOST_COMPUTATIONS:
        return price
    times = pipeline_times(request.ledger, stages, request.cluster, price, "zb-h1", microbatches)
    channels = tuple(Channel(*ends, gradient=t.gradient_s is not None) for ends, t in sorted(times.transfers.items()))
    ranks = tuple(tuple(ranks) for ranks in rank_ranges([stage.replicas for stage in stages]))
    shape = PipelineShape(ranks, channels, "zb-h1", microbatches, depths=price.in_flight)
    outcome = simulate(shape, times.stages, times.transfers, _MINIBATCHES)
    first, last = outcome.completions_s[microbatches - 1], outcome.completions_s[-1]
    return replace(price, seconds_per_minibatch=(last - first) / (_MINIBATCHES - 1))
