"""The fastest regular interleaved plan, beside one under 1F1B with a flush.

Several chunks of the model per worker make the bubble as many times smaller, for as many times more
messages and some more memory (Narayanan et al., SC 2021, section 2.2). A grid of

    degree      ranks that divide the layers
    workers     in one pipeline: as many as some number of copies leaves for each
    copies      of the pipeline, as many as there are GPUs for; they divide the optimizer's state
                where that is allowed
    chunks      of equally many blocks, from 2 on, on each worker

Of each worker's chunks the first ones recompute their blocks, as many as memory demands. A point of
the grid is not below, for the work of one microbatch in `once_s` seconds,

    (m / copies + (workers - 1) / chunks) · once_s / workers
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.recomputation import units_of
from planner.errors import InfeasibleError
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.schedule.chunked import INTERLEAVED
from planner.solver.alternatives.simpler_ways import indistinct_share
from planner.solver.assemble import complete, report_of
from planner.solver.by_hand import equal_blocks
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.evaluate.pipelines import too_large
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer, Evaluation
from planner.solver.request import Request
from planner.stages.sharding import UNSHARDED

REGULAR = "chunks of equally many blocks"  # where a bound is of interleaved plans, too


def prefer_interleaved_if_faster(plan: Plan, request: Request) -> Plan:
    """Return the fastest regular interleaved plan where it is 2% faster than a plan under
    1f1b-flush, and by more than estimates tell plans apart, or the plan.

    So much must several times as many messages earn, for what waits for them is not all known. Both
    have the same minibatch, and the same table of other ways.
    """
    if request.options.names_solver or plan.cluster.kinds:
        return plan

    same = request.on(plan.cluster).under(plan.schedule, plan.microbatches).settled()
    problem = same.problem(same.unlimited_budget())

    simulated = plan.predicted.by == "simulation"
    found = interleaved(problem, _required_s(plan, problem))
    if found.best is None or (simulated and not found.best.simulated):
        return plan

    known = plan.solver
    bounds_of = [words for words in (known.bound_of, REGULAR) if words]
    answer = Answer(
        found.best,
        min(known.lower_bound_s, found.bound_s),
        bound_of=", ".join(bounds_of),
    )

    report = report_of(found.problem, answer, known.seconds)
    accepts = request.options.accept_divided_loss
    with suppress(InfeasibleError):  # copies of weights that several stages use do not fit
        faster = complete(found.problem, found.best, report, accepts_loss=accepts)
        return replace(faster, baselines=plan.baselines, notes=plan.notes)

    return plan


def _required_s(plan: Plan, problem: Problem) -> float:
    """Return seconds per minibatch that an interleaved plan must be below."""
    tuning = problem.tuning
    seconds = plan.predicted.seconds_per_minibatch
    if plan.predicted.by != "simulation":
        seconds *= 1 + tuning.evaluate.assumed_waiting_share
    saving = max(tuning.answer.min_saving_share, indistinct_share(plan, tuning))
    return seconds * (1 - saving)


@dataclass(frozen=True)
class Interleaved:
    """The fastest regular interleaved plan, and its problem; None where none takes less than was
    asked for.
    """

    problem: Problem
    best: Evaluation | None
    bound_s: float  # that no regular plan is below; infinity where none fits the memory


@dataclass(frozen=True, order=True)
class _Point:
    """A point of the grid, and seconds that no plan there is below; the most promising is the
    least.
    """

    least_s: float
    degree: int
    workers: int
    copies: int
    chunks: int


@dataclass(frozen=True)
class _Lean:
    """A priced plan that fits the memory, with the problem that it is priced for."""

    plan: Evaluation
    problem: Problem  # on groups of ranks
    degree: int


def interleaved(problem: Problem, below_s: float) -> Interleaved:
    """Find the fastest regular interleaved plan that takes less than the seconds.

    Args:
        problem: that of plans under another schedule.
        below_s: seconds per minibatch. Plans that are too large are not simulated, but priced.
    """
    bound_s = math.inf
    best_s = below_s
    leans: list[_Lean] = []
    for point in sorted(_grid(problem)):
        if point.least_s >= best_s or problem.clock.passed:
            bound_s = min(bound_s, point.least_s)
            break

        lean = _lean_at(problem, point)
        if lean is None:
            continue

        bound_s = min(bound_s, lean.plan.seconds)
        comparable_s = problem.comparable_s(lean.plan)
        if comparable_s < best_s:
            leans.append(lean)
            best_s = comparable_s

    return _fastest(problem, leans, below_s, bound_s)


def _fastest(
    problem: Problem, leans: Sequence[_Lean], below_s: float, bound_s: float
) -> Interleaved:
    """Simulate the best by the cost model, and return the fastest."""
    most = problem.tuning.propose.most_interleaved_simulated
    answer = Interleaved(problem, None, bound_s)
    best_s = below_s
    for lean in sorted(leans, key=lambda each: each.plan.seconds)[:most]:
        plan = lean.plan
        if not (too_large(lean.problem, plan.stages) or lean.problem.clock.passed):
            plan = evaluate(lean.problem, plan.stages)
        comparable_s = problem.comparable_s(plan)
        if comparable_s < best_s:
            best_s = comparable_s
            own = _under_chunks(problem, lean.problem.setting.chunks)
            answer = replace(answer, problem=own, best=plan.divided(lean.degree))

    return answer


def _under_chunks(problem: Problem, chunks: int) -> Problem:
    return replace(problem, setting=replace(problem.setting, schedule=INTERLEAVED, chunks=chunks))


def _grid(problem: Problem) -> Iterator[_Point]:
    """Yield the points whose state may fit the memory."""
    for degree in problem.rules.tensor or (1,):
        groups = problem.on_groups_of(degree)
        gpus = groups.cluster.gpus
        for workers in sorted({gpus // copies for copies in range(1, gpus // 2 + 1)}):
            copies = min(gpus // workers, groups.most_replicas)
            if _divides_evenly(groups, workers, copies) and _state_may_fit(groups, workers, copies):
                yield from _chunked(groups, degree, workers, copies)


def _divides_evenly(problem: Problem, workers: int, copies: int) -> bool:
    """Whether copies have equally many microbatches, and each at least one for every worker."""
    microbatches = problem.microbatches
    return microbatches % copies == 0 and microbatches // copies >= workers


def _state_may_fit(problem: Problem, workers: int, copies: int) -> bool:
    """Whether an equal part of the model's state fits a worker."""
    memory_bytes = problem.cluster.memory_bytes
    if memory_bytes is None:
        return True

    footprint = problem.layer_costs.footprint(problem.layer_costs.single_stage)
    kept_bytes = float(footprint.weight_bytes + footprint.gradient_bytes)
    optimizer_bytes = float(footprint.optimizer_bytes)
    if problem.sharding.optimizer:
        optimizer_bytes /= copies
    return (kept_bytes + optimizer_bytes) / workers <= memory_bytes


def _chunked(problem: Problem, degree: int, workers: int, copies: int) -> Iterator[_Point]:
    """Yield the points of all numbers of chunks, by the formula above."""
    everything = problem.layer_costs.everything
    once_s = float(everything.forward_s + everything.backward_s)
    blocks = max(problem.layer_costs.block_of) + 1
    most = min(problem.tuning.propose.most_chunks, blocks // workers)
    for chunks in range(2, most + 1):
        units = problem.microbatches / copies + (workers - 1) / chunks
        yield _Point(units * once_s / workers, degree, workers, copies, chunks)


def _lean_at(problem: Problem, point: _Point) -> _Lean | None:
    """Return the plan of a point whose workers recompute as few of their chunks as fit; None if it
    does not fit.
    """
    groups = _under_chunks(problem.on_groups_of(point.degree), point.chunks)
    stages = equal_blocks(groups.layer_costs, point.workers * point.chunks)
    if len(stages) < point.workers * point.chunks:
        return None

    options = StageOptions(point.copies)
    if point.copies > 1 and groups.sharding.optimizer:
        options = options.with_sharding(UNSHARDED.of_optimizer_alone())
    trial = _Recomputing(groups, stages, options, point.workers)
    plan = trial.lean_enough()
    if plan is None:
        return None
    return _Lean(plan, groups, point.degree)


@dataclass(frozen=True)
class _Recomputing:
    """The plans of one cut whose workers recompute some of their first chunks."""

    problem: Problem
    stages: Sequence[Candidate]
    options: StageOptions
    workers: int

    def lean_enough(self) -> Evaluation | None:
        """Return the plan that recomputes as little as the rule and the memory allow; None if none
        fits.
        """
        chunks = self.problem.setting.chunks
        match self.problem.recompute:
            case "never":
                return self._allowed(0)
            case "auto":
                # Blocks that recompute one by one each keep what enters them; as one group, they
                # need more memory when they run.
                return self._fewest(0, chunks, whole=False) or self._fewest(0, chunks, whole=True)
            case "blocks":
                return self._allowed(chunks)
            case "always":
                return self._allowed(chunks, whole=True)

    def _fewest(self, least: int, most: int, *, whole: bool) -> Evaluation | None:
        """Return the plan with the fewest chunks that fits; the more recompute, the less is
        held.
        """
        best = self._allowed(most, whole=whole)
        while best is not None and least < most:
            middle = (least + most) // 2
            plan = self._allowed(middle, whole=whole)
            if plan is None:
                least = middle + 1
            else:
                most = middle
                best = plan

        return best

    def _allowed(self, chunks: int, *, whole: bool = False) -> Evaluation | None:
        """Return the priced plan whose workers recompute so many chunks; None if it is not
        allowed.
        """
        stages = []
        for number, stage in enumerate(self.stages):
            groups: tuple[frozenset[int], ...] = ()
            if number < chunks * self.workers:
                groups = self._groups(stage, whole=whole)
            stages.append(replace(stage, options=replace(self.options, recompute=groups)))

        plan = priced(self.problem, stages)
        if self.problem.allows(plan):
            return plan
        return None

    def _groups(self, stage: Candidate, *, whole: bool) -> tuple[frozenset[int], ...]:
        """Return what recomputes together in a stage: all of it, or each block by itself."""
        if whole:
            return (stage.layers,)
        units = units_of(self.problem.layer_costs, sorted(stage.layers))
        return tuple(map(frozenset, units))
