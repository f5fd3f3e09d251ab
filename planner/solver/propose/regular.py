"""Regular plans, as people choose them by hand: equal stages with equally many replicas each.

They are the first answer, the answer where time runs out, and what no answer may be slower than. A
grid of

    stages      equal in time, or of equally many blocks; as many as are a power of two, and under
                schedules that drain whatever number uses all GPUs: on 35 groups of GPUs 35, 17,
                11, 8, 7
    replicas    as many as there are GPUs for; also on a half, a quarter and so on of the GPUs
    sharding    nothing, the optimizer's state, or of a single stage its gradients and weights, too,
                also inside servers

A stage that does not fit the memory recomputes as little as makes it fit. Plans come in the order
of their prices, though pricing a plan of many stages takes time, and finding what recomputes adds
to the price: so both wait until nothing else can be the next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

import numpy as np

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.work import Floats
from planner.formats.files import replace
from planner.solver.by_hand import equal_blocks, equal_times
from planner.solver.evaluate.evaluation import priced
from planner.solver.evaluate.leaner import Leaner
from planner.solver.pool import Batch, Pool
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.problem.states import column
from planner.solver.tuning.searches import RestrictedTuning
from planner.units import SLACK

Cut = Sequence[Candidate]


def regular_plans(problem: Problem) -> Iterator[Evaluation]:
    """Yield the regular plans that fit the memory, the fastest by the cost model first.

    After the problem's deadline no more than one.
    """
    leaner = Leaner(problem)
    grid = [*_grid(problem)]
    waiting: list[tuple[float, int, Evaluation | None]] = []
    for number, point in enumerate(grid):
        heappush(waiting, (point.least_s, number, None))
    priced_once: set[int] = set()
    fitting = 0

    while waiting and not (fitting and problem.clock.passed):
        _, number, plan = heappop(waiting)
        stages = grid[number].stages
        if plan is not None:
            fitting += 1
            yield plan
        elif number not in priced_once:
            priced_once.add(number)
            heappush(waiting, (priced(problem, stages).seconds, number, None))
        else:
            lean = leaner.lean_enough(stages)
            if lean is not None:
                heappush(waiting, (lean.seconds, number, lean))


def propose_regular(problem: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield regular plans, each as a batch, as long as they may be faster than the pool's best."""
    for plan in regular_plans(problem):
        if plan.seconds >= pool.best_s * (1 - SLACK) or pool.problem.clock.passed:
            return
        yield [plan.stages]


@dataclass(frozen=True)
class _Point:
    """One plan of the grid, and seconds per minibatch that it is not below."""

    least_s: float
    cut: Cut
    options: StageOptions

    @property
    def stages(self) -> list[Candidate]:
        return [replace(stage, options=self.options) for stage in self.cut]


def _grid(problem: Problem) -> Iterator[_Point]:
    """Yield the plans whose weights and optimizer state have room; whether all of it has, is not
    known yet.
    """
    costs = problem.layer_costs
    gpus = problem.cluster.gpus
    layers = _Layers.of(problem)
    most = min(gpus, problem.rules.max_stages or gpus, len(layers.compute_s))
    counts = _numbers_of_stages(problem, most)

    cuts = equal_times(costs, counts, problem.budget.clock)
    for stages, equal in zip(counts, cuts, strict=False):
        if len(equal) < stages:
            return  # there are fewer places to cut
        blocks = equal_blocks(costs, stages)
        yield from _points(problem, layers, equal)
        if len(blocks) == stages and blocks != equal:
            yield from _points(problem, layers, blocks)


def _points(problem: Problem, layers: "_Layers", cut: Cut) -> Iterator[_Point]:
    """Yield the plans of one cut: all numbers of replicas, and all that they may divide."""
    stages = len(cut)
    gpus = problem.cluster.gpus
    most_replicas = min(
        problem.most_replicas, problem.microbatches if problem.schedule.divides else gpus
    )
    halves = [gpus >> power for power in range(gpus.bit_length())]
    whole = counts_to_try(gpus, problem.tuning.restricted)

    sums = layers.over(cut)
    for used in whole if stages == 1 else halves:
        replicas = used // stages
        if not 1 <= replicas <= most_replicas:
            continue

        least_s = sums.least_s(replicas)
        for sharding in problem.shardings(replicas, stages):
            options = StageOptions(replicas).with_sharding(sharding)
            if sums.may_fit(options):
                yield _Point(least_s, cut, options)


@dataclass(frozen=True)
class _Layers:
    """Costs of each layer of which sums over stages bound their time and their memory."""

    problem: Problem
    compute_s: Floats  # forward and backward
    kept_bytes: Floats  # weights, and gradients where all of them exist at once
    optimizer_bytes: Floats

    @classmethod
    def of(cls, problem: Problem) -> "_Layers":
        costs = problem.layer_costs
        kept_bytes = column(costs, "weight_bytes")
        if problem.microbatches > 1:
            kept_bytes = kept_bytes + column(costs, "gradient_bytes")
        compute_s = column(costs, "forward_s") + column(costs, "backward_s")
        return cls(problem, compute_s, kept_bytes, column(costs, "optimizer_bytes"))

    def over(self, cut: Cut) -> "_StageSums":
        """Return the sums over the stages of a cut."""
        layers = [list(stage.layers) for stage in cut]
        return _StageSums(
            self.problem,
            once_s=float(self.compute_s.sum()),
            slowest_s=max(float(self.compute_s[each].sum()) for each in layers),
            kept_bytes=np.array([self.kept_bytes[each].sum() for each in layers]),
            optimizer_bytes=np.array([self.optimizer_bytes[each].sum() for each in layers]),
        )


@dataclass(frozen=True)
class _StageSums:
    """Costs of the stages of one cut: seconds of all and of the slowest, and bytes of each."""

    problem: Problem
    once_s: float
    slowest_s: float
    kept_bytes: Floats
    optimizer_bytes: Floats

    def least_s(self, replicas: int) -> float:
        """Return seconds per minibatch that a plan of this cut is not below: those of its slowest
        stage.
        """
        problem = self.problem
        if problem.cluster.kinds:
            return 0.0  # devices may be faster than the profiled one

        busy_s = self.slowest_s * problem.microbatches / replicas
        if problem.schedule.formula == "synchronous":
            # The first microbatch passes all stages, and the others wait for the slowest one.
            busy_s = self.once_s + max(0.0, busy_s - self.slowest_s)

        return busy_s * (1 - SLACK)

    def may_fit(self, options: StageOptions) -> bool:
        """Whether the stages' state fits the memory, however much recomputes."""
        cluster = self.problem.cluster
        if cluster.kinds or cluster.memory_bytes is None:
            return True

        kept_parts = options.shards if options.shards_gradients else 1
        held_bytes = self.kept_bytes / kept_parts + self.optimizer_bytes / options.shards
        return float(held_bytes.max()) <= cluster.memory_bytes


def _numbers_of_stages(problem: Problem, most: int) -> list[int]:
    """Return numbers of stages to try, ascending, up to `most`."""
    gpus = problem.cluster.gpus
    counts = {2**power for power in range(most.bit_length())}

    if not (problem.schedule.asynchronous or problem.cluster.kinds):
        using_all = sorted({gpus // replicas for replicas in range(1, gpus + 1)})
        for count, stages in zip(using_all, accumulate(using_all), strict=True):
            if stages <= problem.tuning.propose.most_regular_stages:
                counts.add(count)

    return sorted(count for count in counts if count <= most)


def counts_to_try(gpus: int, tuning: RestrictedTuning) -> list[int]:
    """Return numbers of GPUs to try, descending.

    These are the highest few, and a series that has every small number and then four in each
    octave: 16, 20, 24, 28, 32, 40, ... It does not depend on the cluster, so that whatever is
    proposed for a cluster is proposed for a larger one, too, and more GPUs never make an answer
    worse.
    """
    dense = tuning.most_dense_gpus
    counts = set(range(max(1, gpus - tuning.nearest_counts + 1), gpus + 1))
    counts.update(range(1, min(dense, gpus + 1)))

    octave = dense
    while octave <= gpus:
        quarters = range(octave, 2 * octave, octave // 4)
        counts.update(count for count in quarters if count <= gpus)
        octave *= 2

    return sorted(counts, reverse=True)
