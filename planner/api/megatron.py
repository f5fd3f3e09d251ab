"""A run in Megatron's words: what it comes to by our price, and a better one in the same words.

read        `planner.exports.megatron`
price       the stages that it describes, simulated as any plan's
better      the answer of the search, where Megatron has a form for it, and the same string with
            other sizes; each is written, read and priced again as the string that it is
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from planner.analysis.given_plan import price
from planner.errors import InputError, PlanError, PlannerError
from planner.exports.megatron import MegatronRun, read_arguments
from planner.exports.transformers import megatron_arguments
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.fit import TrainerRun
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.plan.blocks import blocks_of
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.one_stage import FLUSH
from planner.solver.clock import Clock
from planner.units import SLACK

# Ranks and stages of strings beside the given one.
TENSOR_SIZES = (1, 2, 4, 8)
PIPELINE_SIZES = (1, 2, 4, 8, 16)
MOST_SIMULATED = 3  # of these strings, the fastest by the cost model
LEAST_S = 2.0  # to simulate the given string and a better one, whatever the time


@dataclass(frozen=True)
class MegatronQuestion:
    """What a string of Megatron's options is priced for.

    Attributes:
        run: the string, as it was read.
        cluster: that runs it.
        profile_at: returns the profile for microbatches of so many samples, with the costs of
            layers that ranks divide.
        clock: when the answer must be there.
    """

    run: MegatronRun
    cluster: Cluster
    profile_at: Callable[[int], Profile]
    clock: Clock

    def priced(self, run: MegatronRun, clock: Clock) -> Plan:
        """Return the plan that a string describes, priced and simulated as far as the time goes.

        Raises:
            InputError: for stages, GPUs or batches that do not divide.
        """
        profile = self.profile_at(run.micro_batch)
        cluster = self.cluster
        if run.tensor > 1:
            cluster = replace(cluster, sequence_parallel=run.sequence_parallel)
        return price(profile, cluster, stages_of(run, profile, cluster.gpus), clock=clock)


def answer_megatron(question: MegatronQuestion, found: Plan | None) -> TrainerRun:
    """Price a string, and look for a better one.

    Args:
        question: with the string.
        found: the fastest plan of a search; None where nothing fits.

    Raises:
        InputError: for a string that describes no run of this model on these GPUs.
        PlanError: for a model that Megatron does not divide.
    """
    given = question.priced(question.run, question.clock.at_least(LEAST_S))
    _check_same(question.run, given)
    better = _best(question, found)
    if better is not None and not _is_better(better, given):
        better = None
    bound_s = None if found is None else found.solver.lower_bound_s
    return TrainerRun(
        given=given,
        unknown=question.run.unknown,
        better=better,
        arguments=None if better is None else _written(better),
        bound_s=bound_s or None,
    )


def stages_of(run: MegatronRun, profile: Profile, gpus: int) -> OwnPlan:
    """Return the stages that a string describes, of a profile with its microbatches.

    Raises:
        InputError: for stages, GPUs or batches that do not divide.
    """
    replicas = run.replicas(gpus)
    counts = run.layers_of_stages(len(blocks_of(profile)))
    stages = tuple(
        OwnStage(
            blocks=count,
            replicas=replicas,
            tensor=run.tensor,
            sharded=run.sharded and replicas > 1,
            recompute=_recomputed(run, count),
        )
        for count in counts
    )
    chunks = len(counts) // run.pipeline
    return OwnPlan(
        stages=stages,
        schedule=FLUSH if chunks == 1 else INTERLEAVED,
        microbatches=run.global_batch // run.micro_batch,
        chunks=chunks,
    )


def _recomputed(run: MegatronRun, blocks: int) -> bool | int:
    """Return how many of a stage's blocks run their forward again, each by itself."""
    if not run.recomputes:
        return False
    return min(blocks, run.recomputed_layers or blocks)


def _best(question: MegatronQuestion, found: Plan | None) -> Plan | None:
    """Return the fastest string that fits the memory, priced; None where none was found in time."""
    runs = [] if found is None else _as_run(found)
    runs += _others(question)

    no_time = Clock.of(0.0)
    promising: list[tuple[float, MegatronRun]] = []
    for run in dict.fromkeys(runs):
        if promising and question.clock.passed:
            break
        plan = _priced(question, run, no_time)
        if plan is not None and _fits(plan):
            promising.append((_seconds(plan), run))
    promising.sort(key=lambda each: each[0])

    best: Plan | None = None
    for _, run in promising[:MOST_SIMULATED]:
        if best is not None and question.clock.passed:
            break
        plan = _priced(question, run, question.clock.at_least(LEAST_S))
        if plan is not None and (best is None or _seconds(plan) < _seconds(best)):
            best = plan
    return best


def _priced(question: MegatronQuestion, run: MegatronRun, clock: Clock) -> Plan | None:
    """Return the plan of a string; None where there is no such run of this model, or where another
    string would be written for it.
    """
    try:
        plan = question.priced(run, clock)
        _check_same(run, plan)
        return plan
    except PlannerError:  # sizes that do not divide, of which a grid has many
        return None


def _as_run(found: Plan) -> list[MegatronRun]:
    """Return the answer of a search as a string says it, if Megatron has a form for it."""
    try:
        run = read_arguments(megatron_arguments(found))
    except (PlanError, InputError):
        return []
    return [] if run.unknown else [replace(run, layers=None)]


def _others(question: MegatronQuestion) -> Iterator[MegatronRun]:
    """Yield the string with other sizes, of microbatches up to twice those that it has."""
    run = question.run
    plain = replace(
        run,
        chunks=None,
        layers_per_chunk=None,
        stage_layers=(),
        first_layers=None,
        last_layers=None,
        sharded=True,
        recomputed_layers=None,
        unknown=(),
    )
    sizes = sorted({run.micro_batch, 2 * run.micro_batch})
    for tensor, pipeline, size, recomputes in product(
        TENSOR_SIZES, PIPELINE_SIZES, sizes, (False, True)
    ):
        yield replace(
            plain,
            tensor=tensor,
            pipeline=pipeline,
            micro_batch=size,
            recomputes=recomputes,
            sequence_parallel=run.sequence_parallel and tensor > 1,
        )


def _check_same(run: MegatronRun, plan: Plan) -> None:
    """Check that the string of a plan says the same as the one that it was priced for.

    Raises:
        PlanError: for a model that Megatron does not divide.
        InputError: where ranks divide something else here than they do there.
    """
    written = read_arguments(megatron_arguments(plan))
    if not written.unknown and _sizes(written) == _sizes(run):
        return
    raise InputError(
        f"ranks that share '{plan.model}' divide its experts and the samples of a microbatch here, "
        f"and whole layers in Megatron, so `megatron` has no price",
        hint="ask without it, and compare the speeds",
    )


def _sizes(run: MegatronRun) -> tuple[int, ...]:
    return run.tensor, run.pipeline, run.micro_batch, run.global_batch


def _written(plan: Plan) -> str:
    """Return the string of a plan in one line, without the comments."""
    lines = megatron_arguments(plan).splitlines()
    return " ".join(line for line in lines if not line.startswith("#"))


def _is_better(plan: Plan, given: Plan) -> bool:
    return not _fits(given) or _seconds(plan) < _seconds(given) * (1 - SLACK)


def _fits(plan: Plan) -> bool:
    return not any(map(plan.lacking_bytes, range(len(plan.stages))))


def _seconds(plan: Plan) -> float:
    return plan.predicted.seconds_per_minibatch
