"""What people do by hand: the table of other ways to train, whose best rows compete with what a
search finds.

    data parallel             a replica of the whole model on each GPU; where GPUs differ, also on
                              those of one kind
    one GPU
    ZeRO-1, ZeRO-2, ZeRO-3    data parallel, with optimizer state, gradients and weights divided
                              over the replicas
    HSDP                      the same as ZeRO-3 inside each server, all of which have the whole
                              model
    2, 4, 8 equal stages      pipelines of equally many blocks under 1F1B with a flush, with
                              replicas on the other GPUs

All rows have the question's samples per update. So no way has more replicas than a minibatch has
microbatches: the others would idle, or the minibatch would have to grow. Under 1f1b, which does not
divide minibatches, every stage updates after a minibatch on each of its replicas; there, rows
differ, and each says its own number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cost.candidate import Candidate
from planner.cost.kinds import everything_on, fastest_rank
from planner.formats.files import replace
from planner.formats.plan_parts import OtherWay
from planner.schedule.one_stage import FLUSH
from planner.solver.by_hand import equal_blocks, recomputing, replicated
from planner.solver.evaluate.evaluation import priced, simulated
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.request import Request
from planner.stages.replicas import most_replicas, samples_per_update
from planner.stages.sharding import usual_shardings, why_whole

ONE_GPU = "one GPU"
DATA_PARALLEL = "data parallel"
EQUAL_STAGES = "equal stages"  # of equally many blocks


@dataclass(frozen=True)
class Way:
    """One way to train: its name, the problem that it solves, and its stages with their price."""

    name: str
    problem: Problem
    plan: Evaluation
    part: float = 1.0  # of a microbatch that takes as many samples as one of the others

    @property
    def seconds_per_microbatch(self) -> float:
        """Seconds per microbatch, which all ways have in common."""
        return self.part * self.plan.seconds / self.problem.microbatches

    @property
    def over_memory_bytes(self) -> int:
        """By how many bytes the GPU that needs most exceeds its memory; 0 if all fit."""
        return self.plan.over_bytes(self.problem.cluster)

    @property
    def samples_per_update(self) -> tuple[int, int]:
        """Samples whose gradients make an update, at the stages of the fewest and of the most
        replicas.
        """
        return samples_per_update(
            self.problem.schedule,
            self.problem.microbatches,
            self.problem.layer_costs.given.microbatch_size,
            [stage.replicas for stage in self.plan.stages],
        )

    def described(self) -> OtherWay:
        """Return the row of this way."""
        schedule = self.problem.schedule
        return OtherWay(
            name=self.name,
            config=self.plan.config,
            schedule=schedule,
            microbatches=self.problem.microbatches,
            samples_per_update=self.samples_per_update,
            seconds_per_microbatch=self.seconds_per_microbatch,
            memory_bytes=max(self.plan.price.gpu_bytes),
            over_memory_bytes=self.over_memory_bytes,
            staleness=max(map(schedule.staleness, self.plan.price.in_flight)),
        )


def usual_ways(request: Request, budget: Budget) -> Iterator[Way]:
    """Yield the ways in the order of the table; those that fit are simulated as far as the budget
    goes.

    All but the pipelines run under the request's schedule, without chunks. What does not fit the
    memory recomputes every block, unless the options forbid it.
    """
    options = request.options
    schedule = options.order.unchunked
    whole = request.with_options(replace(options, schedule=schedule))
    problem = whole.problem(budget)
    yield from _data_parallel(problem)
    yield from _on_one_kind(problem)
    yield _one_gpu(problem)
    yield from _sharded(problem)

    drained = replace(
        options,
        schedule=FLUSH,
        microbatches=options.microbatches if schedule.divides else None,
        depth="published",
    )

    yield from _equal_stages(request.with_options(drained).problem(budget))


def _data_parallel(problem: Problem) -> Iterator[Way]:
    plain = _way(DATA_PARALLEL, problem, [replicated(problem)])
    yield plain

    fitting = _fitting(plain)
    if fitting is not plain:
        yield fitting


def _on_one_kind(problem: Problem) -> Iterator[Way]:
    """Yield data parallelism on the GPUs of each kind of which there are several."""
    cluster = problem.cluster
    for kind, ranks in zip(cluster.kinds, cluster.kind_ranks, strict=True):
        if len(ranks) > 1:
            used = ranks[: most_replicas(problem.schedule, problem.microbatches, len(ranks))]
            stage = everything_on(problem.layer_costs, cluster, used)
            name = f"{DATA_PARALLEL}, {kind.title} only"
            yield _fitting(_way(name, problem, [stage]))


def _one_gpu(problem: Problem) -> Way:
    fastest = fastest_rank(problem.layer_costs, problem.cluster)
    stage = everything_on(problem.layer_costs, problem.cluster, [fastest])
    return _way(ONE_GPU, problem, [stage])


def _sharded(problem: Problem) -> Iterator[Way]:
    """Yield data parallelism at each sharding level.

    From ZeRO-2 on, replicas exchange something for every microbatch. So they drain the pipeline,
    also where the question's schedule does not, and have equally many microbatches each.
    """
    stage = replicated(problem)
    if stage.replicas == 1:
        return

    drained = _drained(problem, stage.replicas)
    whole = why_whole(drained.schedule, drained.microbatches, [stage.replicas]) is None
    server = next(iter(problem.server_sizes), None)
    for sharding in usual_shardings(stage.replicas, server, whole=whole):
        within = drained if sharding.divides_gradients else problem
        sharded = replace(stage, options=stage.options.with_sharding(sharding))
        yield _fitting(_way(sharding.title, within, [sharded]))


def _drained(problem: Problem, replicas: int) -> Problem:
    """Return a problem under a synchronous schedule with the samples per update of so many
    replicas.
    """
    if not problem.schedule.asynchronous:
        return problem
    return problem.with_schedule(
        FLUSH, problem.microbatches if problem.schedule.divides else replicas
    )


def _equal_stages(problem: Problem) -> Iterator[Way]:
    gpus = problem.cluster.gpus
    usual = problem.tuning.answer.usual_stages
    deepest = max(2, min(gpus, max(usual)))  # 3 on 3 GPUs
    for count in sorted({*usual, deepest}):
        stages = equal_blocks(problem.layer_costs, count)
        if gpus % count == 0 and len(stages) == count:
            most = most_replicas(problem.schedule, problem.microbatches, gpus // count)
            copied = _with_replicas(stages, most)
            yield _fitting(_way(f"{count} {EQUAL_STAGES}", problem, copied))


def _with_replicas(stages: Sequence[Candidate], count: int) -> list[Candidate]:
    return [replace(stage, options=stage.options.with_replicas(count)) for stage in stages]


def _fitting(way: Way) -> Way:
    """Return the way as it is, or with every block recomputing where it does not fit otherwise."""
    if not way.over_memory_bytes or way.problem.rules.recompute == "never":
        return way
    stages = recomputing(way.problem.layer_costs, way.plan.stages)
    return _way(f"{way.name}, recomputing", way.problem, stages)


def _way(name: str, problem: Problem, stages: Sequence[Candidate]) -> Way:
    """Return a way with its simulated time, or with the cost model's where it does not fit, so that
    nobody can run it.
    """
    plan = priced(problem, stages)
    if not plan.over_bytes(problem.cluster):
        plan = simulated(problem, plan)
    return Way(name, problem, plan)
