"""Regular interleaved plans, beside what a search finds under 1F1B with a flush.

Several chunks of the model per worker make the bubble as many times smaller, for as many times more messages and some
more memory (Narayanan et al., SC 2021, section 2.2). Tried are all numbers of workers in a pipeline, each in as many
copies as there are GPUs for, with chunks of equally many blocks up to `MOST_CHUNKS` per worker, on groups of ranks of
every degree. Of each worker's chunks the first ones recompute their blocks, as many as memory demands; copies divide
the optimizer's state where that is allowed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.recomputation import units_of
from planner.schedule.chunked import INTERLEAVED
from planner.solver.choose.baselines import equal_blocks
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.evaluate.pipelines import too_large
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation

MOST_CHUNKS = 16  # on a worker
MOST_SIMULATED = 3


@dataclass(frozen=True)
class Interleaved:
    """The fastest regular interleaved plan, and its problem; None where none takes less than was asked for."""

    problem: Problem
    best: Evaluation | None
    bound_s: float  # that no regular plan is below; infinity where none fits the memory


def interleaved(problem: Problem, below_s: float) -> Interleaved:
    """Find the fastest regular interleaved plan that takes less than the seconds.

    `problem` is that of plans under another schedule. Plans that are too large are not simulated, but priced.
    """
    degrees, found = problem.rules.tensor or (1,), list[tuple[Evaluation, Problem, int]]()
    shapes = [shape for degree in degrees for shape in _shapes(problem.on_groups_of(degree), degree)]
    bound_s = math.inf
    for least_s, degree, workers, copies, chunks in sorted(shapes):
        best_s = min((plan.counted_s for plan, _, _ in found), default=below_s)
        if least_s >= best_s or problem.clock.passed:
            bound_s = min(bound_s, least_s)
            break
        groups = problem.on_groups_of(degree)
        setting = replace(groups.setting, schedule=INTERLEAVED, chunks=chunks)
        own = replace(groups, setting=setting)
        if (plan := _lean_enough(own, workers, copies)) is not None:
            bound_s = min(bound_s, plan.seconds)
            if plan.counted_s < best_s:
                found.append((plan, own, degree))
    answer = Interleaved(problem, None, bound_s)
    for plan, own, degree in sorted(found, key=lambda each: each[0].seconds)[:MOST_SIMULATED]:
        known = plan if too_large(own, plan.stages) or own.clock.passed else evaluate(own, plan.stages)
        if known.counted_s < (below_s if answer.best is None else answer.best.counted_s):
            setting = replace(problem.setting, schedule=INTERLEAVED, chunks=own.setting.chunks)
            answer = replace(answer, problem=replace(problem, setting=setting), best=known.divided(degree))
    return answer


def _shapes(problem: Problem, degree: int) -> Iterator[tuple[float, int, int, int, int]]:
    """Yield the least seconds of regular plans, degree, workers, copies and chunks, where the state may fit."""
    gpus, microbatches, costs = problem.cluster.gpus, problem.microbatches, problem.layer_costs
    blocks, everything = max(costs.block_of) + 1, costs.everything
    once_s = float(everything.forward_s + everything.backward_s)
    footprint = costs.footprint(costs.single_stage)
    kept, optimizer = float(footprint.weight_bytes + footprint.gradient_bytes), float(footprint.optimizer_bytes)
    for workers in sorted({gpus // copies for copies in range(1, gpus // 2 + 1)}):
        copies = min(gpus // workers, problem.most_replicas)
        state = (kept + optimizer / (copies if max(problem.levels) > 0 else 1)) / workers
        too_much = problem.cluster.memory_bytes is not None and state > problem.cluster.memory_bytes
        if too_much or microbatches % copies or microbatches // copies < workers:
            continue
        for chunks in range(2, min(MOST_CHUNKS, blocks // workers) + 1):
            least_s = (microbatches / copies + (workers - 1) / chunks) * once_s / workers
            yield least_s, degree, workers, copies, chunks


def _lean_enough(problem: Problem, workers: int, copies: int) -> Evaluation | None:
    """Return the priced plan whose workers recompute as few of their chunks as fit; None if it does not fit anyhow."""
    costs, chunks = problem.layer_costs, problem.setting.chunks
    stages = equal_blocks(costs, workers * chunks)
    if len(stages) < workers * chunks:
        return None
    level = int(copies > 1 and max(problem.levels) > 0)

    def recomputing(count: int, whole: bool) -> Evaluation:
        return priced(problem, list(_stages(problem, stages, StageOptions(copies, level), count * workers, whole)))

    if problem.recompute == "never":
        return plan if problem.allows(plan := recomputing(0, False)) else None
    # Blocks that recompute one by one each keep what enters them; as one group, they need more memory when they run.
    for whole in (False, True) if problem.recompute == "auto" else (problem.recompute == "always",):
        most, least = chunks, 0 if problem.recompute == "auto" else chunks
        if problem.allows(best := recomputing(most, whole)):
            while least < most:
                middle = (least + most) // 2
                if problem.allows(plan := recomputing(middle, whole)):
                    most, best = middle, plan
                else:
                    least = middle + 1
            return best
    return None


def _stages(
    problem: Problem, stages: Sequence[Candidate], options: StageOptions, first: int, whole: bool
) -> Iterator[Candidate]:
    """Yield the stages with their options; the first ones recompute as a whole, or each of their blocks by itself."""
    for number, stage in enumerate(stages):
        units = [stage.layers] if whole else map(frozenset, units_of(problem.layer_costs, sorted(stage.layers)))
        yield replace(stage, options=replace(options, recompute=tuple(units) if number < first else ()))
