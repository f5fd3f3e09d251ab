"""Tuned numbers of evaluating and improving plans: what is simulated, how deep, and how often."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BudgetTuning:
    """Of `planner.solver.problem.budget`, and of the pool that spends it."""

    # Share of the time for searches. The rest is for simulating what they find.
    search_share: float = 0.8

    # Instructions of all workers in all simulations of one search: some seconds. They are counted,
    # so that the same question has the same answer on any machine.
    most_instructions: int = 2**19

    # Seconds to simulate after the time limit. Otherwise nobody knows which plan is the fastest.
    grace_s: float = 3.0


@dataclass(frozen=True)
class EvaluateTuning:
    """Of pricing, simulating and comparing plans."""

    # Above either, simulating takes too long: workers of an asynchronous plan, and forwards of a
    # minibatch on all workers, of all chunks.
    most_workers: int = 64
    most_forwards: int = 2**14

    # Share of its time by the cost model that a plan waits which was not simulated. Most wait less,
    # as 135 of 180 simple ones did.
    assumed_waiting_share: float = 0.02

    # How many times as fast a pipeline must be whose gradients are an update later.
    min_speedup_per_stale_update: float = 1.05

    # A plan this close to the bound counts as optimal, and so little more that should be in flight
    # makes no pipeline deeper: timings are no better.
    timing_share: float = 0.01

    # A plan this close to the lower bound needs no alternative.
    settled_share: float = 1e-3


@dataclass(frozen=True)
class DepthTuning:
    """Of `planner.solver.evaluate.depths` and `draining_depths`."""

    # Ratios of times that are not gained: by depths beyond the inequality of asynchronous
    # pipelines, by less depth than that, and by deeper pipelines that drain.
    max_gain_of_more: float = 1.25
    max_gain_of_less: float = 1.1
    max_gain_of_draining: float = 1.5

    # Share of the budget that is kept for other pipelines than the one that is deepened.
    reserved_share: float = 0.5

    # Stages up to which a pipeline that drains is deepened where memory does not allow all of them
    # what hides their messages. The stages that are cut off keep the others waiting, so that many
    # longer ones took twice as long.
    most_uneven_stages: int = 8


@dataclass(frozen=True)
class PortfolioTuning:
    """Of `planner.solver.portfolio` and `planner.solver.attempts`."""

    # Regular plans that are simulated before any search, where they have at most so many forwards
    # of a minibatch: parts of a second.
    first_plans: int = 3
    quick_forwards: int = 2**12

    # Communicators up to which room is made for one more at a time. Beyond, their number doubles.
    most_single_communicators: int = 5

    # Share of the time. Where messages of copies of weights take more, plans without copies are
    # worth a search.
    slow_copies_share: float = 0.05


@dataclass(frozen=True)
class ImproveTuning:
    """Of `planner.solver.improve`: local search on simulated times."""

    # Starts, each at another number of stages or of replicas; and on GPUs of several kinds.
    starts: int = 4
    mixed_starts: int = 6

    # Plans priced from each start for models of up to `few_layers`; of larger ones, fewer.
    most_priced: int = 100
    few_layers: int = 50

    # Instructions of the simulations from each start: a part of a second.
    most_instructions: int = 2**16

    # How many times as many plans are priced on clusters of several levels, with half as many times
    # the instructions: where links differ, searches propose worse starts.
    levels_ratio: int = 4

    # How many times the published depths stages are given room for, beginning with the published
    # ones.
    depth_ratios: tuple[float, ...] = (1.0, 1.5, 2.0)

    # Times the best plan's seconds, up to which plans are simulated whose price may be too high:
    # stages on unlike GPUs update at different times, which the cost model of synchronous schedules
    # adds up.
    overpriced_ratio: float = 1.25

    # Ways to share out GPUs of several kinds that are priced for one plan.
    most_allotments: int = 24
