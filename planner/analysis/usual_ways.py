"""The ways to train that people use without a planner, priced on the same cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.analysis.solve_options import SolveOptions
from planner.cost.layer_costs import LayerCosts
from planner.formats.cluster import Cluster
from planner.schedule.defaults import MICROBATCHES_PER_GPU
from planner.schedule.flush import FLUSH
from planner.solver.candidates.budget import Budget
from planner.solver.candidates.evaluation import evaluate
from planner.solver.problem import Problem
from planner.solver.reference import baselines
from planner.solver.reference.sharded_data_parallel import ZERO_STAGES, sharded_data_parallel
from planner.solver.result import Evaluation

ONE_GPU, DATA_PARALLEL = "one GPU", "data parallel"
BLOCK_STAGES = (2, 4, 8)  # pipelines of equal blocks, with replicas on the other GPUs, as users of Megatron choose them


@dataclass(frozen=True)
class Way:
    """One way to train: its name, the problem that it solves, and its stages with their price."""

    name: str
    problem: Problem
    plan: Evaluation

    @property
    def seconds_per_microbatch(self) -> float:
        """Seconds per microbatch, which all ways have in common."""
        return self.plan.seconds / self.problem.microbatches

    @property
    def over_memory_bytes(self) -> int:
        """By how many bytes the GPU that needs most exceeds its memory; 0 if all fit."""
        limit = self.problem.cluster.memory_bytes
        return 0 if limit is None else max(0, max(self.plan.price.gpu_bytes) - limit)


def usual_ways(options: SolveOptions, layer_costs: LayerCosts, cluster: Cluster, budget: Budget) -> Iterator[Way]:
    """Yield one GPU, data parallelism, its sharded forms, and pipelines of equal blocks under 1F1B with a flush.

    All but the last run under the options' schedule, without chunks. Where that does not divide minibatches, the
    pipelines of blocks take as many microbatches as `plan solve` would.

    Args:
        options: of the plan that is compared.
        layer_costs: of the model.
        cluster: of identical GPUs.
        budget: ends simulations at its deadline, and the cost model prices what is left.
    """
    gpus = cluster.gpus
    problem = replace(replace(options, schedule=options.schedule.unchunked).problem(layer_costs, cluster), budget=budget)
    yield Way(ONE_GPU, problem, evaluate(problem, baselines.data_parallel(layer_costs, 1)))
    yield Way(DATA_PARALLEL, problem, evaluate(problem, baselines.data_parallel(layer_costs, gpus)))
    if gpus > 1 and options.schedule.pipelined:
        for stage in ZERO_STAGES:
            yield Way(f"ZeRO-{stage}" + " (FSDP)" * (stage == 3), problem, sharded_data_parallel(problem, stage))
    microbatches = problem.microbatches if options.schedule.divides else MICROBATCHES_PER_GPU * gpus
    flushed = replace(problem.under(FLUSH, microbatches), depth="published")
    for count in BLOCK_STAGES:
        if (stages := baselines.equal_blocks(layer_costs, gpus, count)) is not None:
            yield Way(f"{count} x equal blocks", flushed, evaluate(flushed, stages))
