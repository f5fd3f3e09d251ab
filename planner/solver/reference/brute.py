"""Every plan of a small model, one by one: the oracle of the tests.

Shares the formulas with the search, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.price import Price
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.stage_options import RecomputeRule, StageOptions
from planner.errors import InputError
from planner.formats.cluster import Cluster
from planner.formats.plan import CostModelName
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.schedule import Schedule

MOST_LAYERS = 10


@dataclass(frozen=True)
class Answer:
    """The best plan and its price."""

    stages: tuple[Candidate, ...]
    price: Price

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return sum(stage.replicas for stage in self.stages)

    @property
    def rank(self) -> tuple[int, int, int]:
        """What decides among equally fast plans."""
        return self.gpus, len(self.stages), sum(stage.options.recompute for stage in self.stages)


def brute_force(
    layer_costs: LayerCosts,
    cluster: Cluster,
    *,
    model: CostModelName = "resource",
    schedule: Schedule = ONE_F_ONE_B,
    microbatches: int = 1,
    chunks: int = 1,
    recompute: RecomputeRule = "auto",
    in_order: bool = False,
    resolution: float = 1e-11,
) -> Answer | None:
    """The fastest plan that fits, or None; times closer than `resolution` are equal.

    Then fewer GPUs win, fewer stages, and fewer that recompute.

    Args:
        in_order: only stages of consecutive layers.

    Raises:
        InputError: for more than ten layers, whose plans are too many.
    """
    if len(layer_costs.profile.layers) > MOST_LAYERS:
        raise InputError(
            f"{len(layer_costs.profile.layers)} layers are too many to try every plan", hint="use the search"
        )
    best: Answer | None = None
    every = (
        interleaved_plans(layer_costs, cluster.gpus, in_order, recompute, microbatches, chunks)
        if schedule.chunked
        else plans(layer_costs, cluster.gpus, in_order, recompute)
    )
    setting = Setting(cluster, schedule, microbatches, chunks, model)
    for stages in every:
        cost = price(layer_costs, stages, setting)
        if cluster.memory_bytes is not None and max(cost.gpu_bytes) > cluster.memory_bytes:
            continue
        depths = zip(stages, cost.in_flight, strict=True)
        if not all(schedule.versions_suffice(microbatches, stage.replicas, depth) for stage, depth in depths):
            continue
        answer = Answer(stages, cost)
        if best is None or _beats(answer, best, resolution):
            best = answer
    return best


def plans(
    layer_costs: LayerCosts, gpus: int, in_order: bool, recompute: RecomputeRule = "never"
) -> Iterator[tuple[Candidate, ...]]:
    """All chains of legal cuts with all replica counts that the GPUs allow."""
    variants = {"auto": (False, True), "never": (False,), "always": (True,)}[recompute]
    cuts = [done for done in downsets(layer_costs) if not in_order or done == frozenset(range(len(done)))]
    everything = frozenset(range(len(layer_costs.profile.layers)))

    def extend(before: frozenset[int], left: int) -> Iterator[tuple[Candidate, ...]]:
        for after in cuts:
            if not before < after:
                continue
            for replicas, again in product(range(1, left + 1), variants):
                stage = Candidate(before, after - before, StageOptions(replicas, again))
                if after == everything:
                    yield (stage,)
                else:
                    yield from ((stage, *rest) for rest in extend(after, left - replicas))

    return extend(frozenset(), gpus)


def interleaved_plans(
    layer_costs: LayerCosts, gpus: int, in_order: bool, recompute: RecomputeRule, microbatches: int, chunks: int
) -> Iterator[tuple[Candidate, ...]]:
    """All chains of legal cuts into `chunks` stages for each of two workers or more, in as many copies as there may be.

    Each copy has at least as many microbatches as workers.
    """
    for stages in plans(layer_costs, len(layer_costs.profile.layers), in_order, recompute):
        workers, rest = divmod(len(stages), chunks)
        if rest == 0 and workers >= 2 and all(stage.replicas == 1 for stage in stages):
            for copies in range(1, gpus // workers + 1):
                if microbatches // copies >= workers:
                    yield tuple(replace(stage, options=replace(stage.options, replicas=copies)) for stage in stages)


def downsets(layer_costs: LayerCosts) -> list[frozenset[int]]:
    """Sets of layers that hold all predecessors of their layers and respect `no_cut_after`, by definition."""
    count = len(layer_costs.profile.layers)
    joined = [layer_costs.position[name] for name in layer_costs.profile.no_cut_after]
    subsets = (frozenset(index for index in range(count) if bits >> index & 1) for bits in range(2**count))
    return [
        done
        for done in subsets
        if all(value.producer in done for value in layer_costs.traffic if done.intersection(value.users))
        and all((index in done) == (index + 1 in done) for index in joined if index + 1 < count)
    ]


def _beats(answer: Answer, best: Answer, resolution: float) -> bool:
    mine, its = answer.price.seconds_per_minibatch, best.price.seconds_per_minibatch
    if abs(mine - its) > resolution * its:
        return mine < its
    return answer.rank < best.rank
