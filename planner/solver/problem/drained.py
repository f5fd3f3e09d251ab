"""A bound on plans of synchronous schedules, one stage per worker, that knows bubble and memory.

    N      GPUs
    m      microbatches of a minibatch
    c_s    seconds per microbatch of stage s, what it recomputes included
    r_s    its replicas
    X      the largest (m / r_s - 1) * c_s
    c      the longest c_s that fits the memory

A plan takes at least the sum of all c_s, in which the first microbatch passes, plus X. From the
definition of X, r_s >= m * c_s / (X + c_s), so that

    N >= m * (sum of c_s) / (X + c)        time >= (1 + m / N) * (sum of c_s) - c

With stages of equal lengths on equally many replicas d = N / p that is the published bubble,
(p - 1) * d / m.

The memory says how much must recompute at least. The replicas of a stage hold together, for each
layer, as many microbatches as there are GPUs from the stage on: at least m / (X + c) times the
seconds of the layers from this one on, up to m. All GPUs have room for the model's state once, and
for that. What exceeds the room is saved by recomputing: `least_recomputation_s`.

Stages of consecutive layers know more than stages of any layers: how far each may reach, what
crosses its ends, and which layers come after it. Of the others, the longest stage has the layers
that take most seconds for their bytes, and after a layer come at least those that it leads to.

A single stage has a bound of its own: `planner.solver.problem.single_stages`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.cost.work import Floats, Integers
from planner.solver.problem.group_totals import GroupTotals, least_recomputation_s, running_sums
from planner.solver.problem.layer_graph import LayerGraph
from planner.solver.problem.problem import Problem
from planner.solver.problem.single_stages import single_stage_s
from planner.units import SLACK


def drained_s(problem: Problem, *, in_order: bool = True) -> float:
    """Return seconds per minibatch that no plan is below by the cost model; infinite if none fits.

    The problem's schedule is synchronous, with one stage per worker and whole backwards, and its
    GPUs are alike. Plans have cuts along the profile's order, or any.
    """
    totals = GroupTotals.of(problem)
    if len(totals.sizes) == 1 or problem.cluster.gpus == 1:
        return single_stage_s(problem, totals, np.inf)

    if in_order:
        ends = _ends_in_order(problem, totals)
    else:
        ends = _ends_of_any_layers(problem, totals)

    several_s = np.inf
    if ends is not None:
        several_s = _several_stages_s(problem, totals, ends)
    return single_stage_s(problem, totals, several_s)


def with_single_stages(problem: Problem, bound_s: float) -> float:
    """Return a bound on other plans, or on a single stage that divides gradients, if less."""
    return single_stage_s(problem, GroupTotals.of(problem), bound_s, divides_gradients=True)


@dataclass(frozen=True)
class _Ends:
    """What is known of the ends of stages that fit.

    Attributes:
        stages: how few hold the whole model.
        longest_s: seconds per microbatch that no stage is above, if all of it recomputes.
        crossing_s: the least seconds of a microbatch's messages over a cut, both ways.
        rest_s: for each group of layers, the least seconds of those from it on.
    """

    stages: int
    longest_s: float
    crossing_s: float
    rest_s: Floats


def _ends_in_order(problem: Problem, totals: GroupTotals) -> _Ends | None:
    """Return what is known of stages of consecutive layers; None if a group of layers fits
    no GPU.
    """
    ends = _farthest_ends(problem, totals)
    stages = _fewest_stages(ends)
    if stages is None:
        return None

    longest_s = _longest_s(problem, totals, ends)
    rest_s = np.cumsum(totals.compute_s[::-1])[::-1]
    return _Ends(stages, longest_s, _crossing_s(problem, totals), rest_s)


def _ends_of_any_layers(problem: Problem, totals: GroupTotals) -> _Ends | None:
    """Return what is known of stages of any layers; None if a group of layers fits no GPU."""
    state_bytes = _least_state_bytes(problem, totals)
    if state_bytes.max() > totals.memory_bytes:
        return None

    # 1. As few stages as have room for the state.
    needed = state_bytes.sum() / totals.memory_bytes
    stages = max(1, math.ceil(needed * (1 - SLACK)))

    # 2. The relaxed knapsack: the last of the layers that fit counts in part. Layers that take no
    #    time come last, whatever they hold.
    seconds = _most_seconds(problem, totals)
    with np.errstate(over="ignore"):
        bytes_per_s = state_bytes / np.maximum(seconds, np.finfo(float).tiny)
    order = np.argsort(bytes_per_s, kind="stable")
    held_bytes = running_sums(state_bytes[order])
    held_s = running_sums(seconds[order])
    longest_s = float(np.interp(totals.memory_bytes, held_bytes, held_s))

    # 3. After each group come those that it leads to.
    rest_s = LayerGraph(problem.layer_costs).seconds_led_to(totals.compute_s)
    return _Ends(stages, longest_s, 0.0, rest_s)


def _several_stages_s(problem: Problem, totals: GroupTotals, ends: _Ends) -> float:
    """Return seconds that no plan of two stages or more is below."""
    gpus = problem.cluster.gpus

    # 1. The longest stage that fits, where all stages together have room for the model's state.
    state_bytes = float(totals.kept_bytes.sum() + totals.optimizer_bytes.sum())
    if state_bytes > gpus * totals.memory_bytes:
        return np.inf

    longest_s = ends.longest_s

    # 2. The sum of all c_s before recomputation, with the messages of the first microbatch.
    once_s = totals.once_s
    filling_s = once_s + max(1, ends.stages - 1) * ends.crossing_s

    # 3. X is not below its bound without recomputation, nor above that with all of it.
    ratio = problem.microbatches / gpus
    least_s = max(0.0, ratio * once_s - longest_s)
    most_s = least_s + (1 + ratio) * float(totals.forward_s.sum())
    limits_s = np.linspace(least_s, most_s, problem.tuning.bounds.drained_intervals + 1)

    # 4. In each interval of X, its end holds the fewest microbatches and its start is the least X.
    bound_s = float(limits_s[-1] + filling_s)
    for start_s, end_s in pairwise(limits_s.tolist()):
        held_bytes = _held_bytes(problem, totals, ends, end_s + longest_s)
        excess_bytes = state_bytes + float(held_bytes.sum()) - gpus * totals.memory_bytes
        again_s = least_recomputation_s(problem, excess_bytes, held_bytes, totals.forward_s)

        busiest_s = max(start_s, ratio * (once_s + again_s) - longest_s)
        bound_s = min(bound_s, filling_s + again_s + busiest_s)

    return bound_s


def _farthest_ends(problem: Problem, totals: GroupTotals) -> Integers:
    """Return for each first group, and the end, where the longest stage ends that fits."""
    state_bytes = running_sums(_least_state_bytes(problem, totals))
    return np.searchsorted(state_bytes, state_bytes + totals.memory_bytes, side="right") - 1


def _least_state_bytes(problem: Problem, totals: GroupTotals) -> Floats:
    """Return the least bytes of each group's state on a GPU."""
    shards = totals.most_replicas if problem.sharding.optimizer else 1
    return totals.kept_bytes + totals.optimizer_bytes / shards


def _fewest_stages(ends: Sequence[int] | Integers) -> int | None:
    """Return how few stages hold the whole model; None if a group fits no GPU."""
    last = len(ends) - 1
    stages = 0
    end = 0
    while end < last:
        if ends[end] == end:
            return None
        end = int(ends[end])
        stages += 1

    return stages


def _longest_s(problem: Problem, totals: GroupTotals, ends: Integers) -> float:
    """Return the most seconds per microbatch of a stage that fits, if all of it recomputes."""
    sums_s = running_sums(_most_seconds(problem, totals))
    return float(np.max(sums_s[ends] - sums_s))


def _most_seconds(problem: Problem, totals: GroupTotals) -> Floats:
    """Return the seconds per microbatch of each group, if it recomputes where the rule
    allows that.
    """
    if problem.recompute == "never":
        return totals.compute_s
    return totals.compute_s + totals.forward_s


def _crossing_s(problem: Problem, totals: GroupTotals) -> float:
    """Return the least seconds of a microbatch's messages over a cut, both ways."""
    groups = len(totals.sizes)
    group_of = np.repeat(np.arange(groups), totals.sizes)
    moved_bytes = np.zeros(groups - 1)

    for value in problem.layer_costs.traffic:
        cut = group_of[value.producer]
        # What a group makes for the next one crosses the cut between them, and no other.
        if group_of[value.users[0]] == cut + 1:
            moved_bytes[cut] += value.sent_bytes + value.returned_bytes

    nearest = problem.topology.link(0)
    return float(moved_bytes.min()) / nearest.bandwidth_bytes_per_s


def _held_bytes(problem: Problem, totals: GroupTotals, ends: _Ends, slowest_s: float) -> Floats:
    """Return the least activations of each group on all GPUs, where X + c is `slowest_s`."""
    microbatches = problem.microbatches
    in_flight = microbatches * ends.rest_s / max(slowest_s, SLACK)
    return totals.saved_bytes * np.minimum(in_flight, microbatches)
