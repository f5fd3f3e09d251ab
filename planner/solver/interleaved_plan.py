"""The interleaved plan for a cluster: the shapes that the search likes best, by what their simulated streams take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from planner.cluster import Cluster
from planner.cost import RecomputeRule, link_of
from planner.errors import InputError
from planner.pricing import Candidate, Ledger, Price, price
from planner.schedule.streams import Channel, PipelineShape
from planner.simulator.pipeline import simulate
from planner.solver.depth import pipeline_times
from planner.solver.infeasible import explain
from planner.solver.interleaved import InterleavedSearch
from planner.solver.search import Path
from planner.solver.states import Chain

MOST_COMPUTATIONS = 2**13  # forwards of a minibatch on all workers, beyond which simulating takes too long
SIMULATED = 4  # plans
_MINIBATCHES = 3

Answer = tuple[Sequence[Candidate], Price]


def solve_interleaved(
    ledger: Ledger, cluster: Cluster, microbatches: int, chunks: int, recompute: RecomputeRule
) -> tuple[Sequence[Candidate], Price, float]:
    """The best interleaved plan found: its stages, its price, and a time that no such plan along the order is below.

    Raises:
        InputError: where there are too few GPUs, layers or microbatches to interleave anything.
        InfeasibleError: where no plan fits the memory.
    """
    space = Chain(ledger)

    def search(gpus: int, memory_bytes: int | None, rule: RecomputeRule = recompute) -> InterleavedSearch:
        return InterleavedSearch(space, link_of(cluster), gpus, memory_bytes, microbatches, chunks, rule)

    def fits(gpus: int, memory_bytes: int) -> Answer | None:
        paths, _ = search(gpus, memory_bytes).best()
        return _priced(ledger, space, cluster, paths[0], microbatches, chunks) if paths else None

    def fits_recomputing(gpus: int, memory_bytes: int) -> Answer | None:
        paths, _ = search(gpus, memory_bytes, "auto").best()
        return _priced(ledger, space, cluster, paths[0], microbatches, chunks) if paths else None

    asked = search(cluster.gpus, cluster.memory_bytes)
    if not asked.shapes():
        raise InputError(
            f"nothing can be interleaved with {cluster.gpus} GPUs, {len(space) - 1} places to end a stage and "
            f"{microbatches} microbatches",
            hint=f"it takes 2 GPUs, {2 * chunks} such places for {chunks} chunks each, and 2 microbatches",
        )
    paths, bound_s = asked.best()
    if not paths:
        raise explain(ledger, cluster, fits, {"--recompute auto": fits_recomputing} if recompute == "never" else {})
    answers = [_priced(ledger, space, cluster, path, microbatches, chunks) for path in paths[:SIMULATED]]
    waited = [(stages, price_with_waits(ledger, stages, cluster, cost, microbatches)) for stages, cost in answers]
    stages, cost = min(waited, key=lambda answer: (answer[1].seconds_per_minibatch, len(answer[0])))
    return stages, cost, min(bound_s, cost.seconds_per_minibatch)


def _priced(ledger: Ledger, space: Chain, cluster: Cluster, path: Path, microbatches: int, chunks: int) -> Answer:
    stages = [
        Candidate(frozenset(space.layers(0, i)), frozenset(space.layers(i, j)), r, again)
        for (i, j), r, again in zip(pairwise(path.states), path.replicas, path.recompute, strict=True)
    ]
    return stages, price(ledger, stages, cluster, schedule="interleaved", microbatches=microbatches, chunks=chunks)


def price_with_waits(
    ledger: Ledger, stages: Sequence[Candidate], cluster: Cluster, price: Price, microbatches: int
) -> Price:
    """`price` of an interleaved plan with the seconds per minibatch that its streams take, where that is more.

    The formula knows the work of each worker, not what it waits for the others between its chunks.
    """
    if len(stages) * microbatches > MOST_COMPUTATIONS:
        return price
    times = pipeline_times(ledger, stages, cluster, price, "interleaved", microbatches)
    workers, copies = len(stages) // price.chunks, stages[0].replicas
    ranks = [tuple(range(position * copies, (position + 1) * copies)) for position in range(workers)]
    channels = tuple(Channel(*ends, gradient=t.gradient_s is not None) for ends, t in sorted(times.transfers.items()))
    shape = PipelineShape(tuple(ranks * price.chunks), channels, "interleaved", microbatches)
    outcome = simulate(shape, times.stages, times.transfers, _MINIBATCHES)
    first, last = outcome.completions_s[microbatches - 1], outcome.completions_s[-1]
    return replace(price, seconds_per_minibatch=max(price.seconds_per_minibatch, (last - first) / (_MINIBATCHES - 1)))
