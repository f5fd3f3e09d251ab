"""Price a plan that is given, by a file or as stages that somebody chose by hand, in the terms of
the solver.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Literal

from planner.cost.candidate import Candidate, Groups, StageOptions, whole_stage
from planner.cost.kinds import with_kinds
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.topology import Busy
from planner.cost.overheads import Price
from planner.cost.pricing import busy_resources
from planner.cost.recomputation import units_of
from planner.errors import ClusterError, InputError, PlanError, did_you_mean
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import cluster_for
from planner.formats.files import replace
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.plan.attention import attention_groups
from planner.plan.blocks import blocks_of
from planner.plan.rank_groups import groups_of, of_groups
from planner.plan.same_model import check_same_model
from planner.plan.shape import check_versions
from planner.schedule.schedule import gpus_after
from planner.solver.assemble import GIVEN, complete
from planner.solver.by_hand import equal_counts, legal_ends
from planner.solver.clock import NO_LIMIT, Clock
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.problem.problem import Problem
from planner.solver.request import Request, options_of
from planner.solver.tuning.record import STANDARD, Tuning
from planner.stages.sharding import why_whole
from planner.units import counted, format_bytes, format_memory


def priced_plan(
    request: Request,
    stages: Sequence[Candidate],
    *,
    accepts_loss: bool = False,
) -> Plan:
    """Return the plan of these stages, priced and simulated, whether or not they fit the memory.

    Raise InputError if the cluster has fewer GPUs than stages need.
    """
    problem = _without_memory_limit(request, stages)
    plan = complete(problem, evaluate(problem, stages), GIVEN, accepts_loss=accepts_loss)
    return replace(plan, cluster=request.cluster)


def seconds_of(request: Request, stages: Sequence[Candidate]) -> float:
    """Return the simulated seconds per minibatch of these stages: those of `priced_plan`."""
    return evaluate(_without_memory_limit(request, stages), stages).seconds


def _without_memory_limit(request: Request, stages: Sequence[Candidate]) -> Problem:
    """Return the problem of pricing these stages: a plan that does not fit has a price, too."""
    cluster = request.cluster
    needed = sum(stage.options.gpus for stage in stages) // request.options.chunks_per_gpu
    check_enough_gpus(needed, cluster)

    unlimited = request.on(cluster.with_memory(lambda _: None))
    problem = unlimited.problem(request.unlimited_budget())
    _check_whole(problem, stages)
    return problem


def check_enough_gpus(needed: int, cluster: Cluster) -> None:
    """Raise InputError if stages need more GPUs than there are."""
    if needed > cluster.gpus:
        raise InputError(
            f"the stages need {counted(needed, 'GPU')}, and the cluster has {cluster.gpus}",
            hint=f"give `gpus={needed}` or more",
        )


def _check_whole(problem: Problem, stages: Sequence[Candidate]) -> None:
    """Raise InputError where replicas would divide gradients or weights that they cannot divide."""
    if not any(stage.options.shards_gradients for stage in stages):
        return

    replicas = [stage.replicas for stage in stages]
    obstacle = why_whole(problem.schedule, problem.microbatches, replicas)
    if obstacle is not None:
        why, hint = obstacle
        raise InputError(why, hint=hint)

    _check_groups(problem.cluster, stages[0].options)


def _check_groups(cluster: Cluster, options: StageOptions) -> None:
    """Raise InputError for groups of replicas that have no equal places in the cluster."""
    if not options.repeats_shards:
        return

    try:
        groups_of(cluster, options.shards * options.ranks_per_replica)
    except ClusterError as error:
        raise InputError(
            f"replicas cannot shard gradients or weights in {counted(options.copies, 'group')}: "
            f"{error.message}",
            hint="leave out the size of the groups, or give that of a server",
        ) from error


@dataclass(frozen=True)
class GivenPlan:
    """A plan, its stages in the terms of the solver, and what was asked.

    Attributes:
        request: for the plan, by the options that it records; its clock is that of everything that
            is solved or simulated, together.
    """

    plan: Plan
    request: Request
    stages: tuple[Candidate, ...]

    @classmethod
    def of(
        cls,
        profile: Profile,
        plan: Plan,
        clock: Clock,
        tuning: Tuning = STANDARD,
    ) -> "GivenPlan":
        """Prepare `plan`; raise PlanError if it was made from another profile."""
        if plan.profile_digest != profile.digest:
            raise PlanError(
                f"the plan was made from another profile of '{plan.model}', not from this one of "
                f"'{profile.model}'",
                hint="give the plan's own `profile`, or solve again",
            )

        request = Request(profile, plan.cluster, options_of(plan), clock, tuning)
        layer_costs = request.layer_costs
        check_same_model(plan, list(layer_costs.position), profile.edges)

        stages = with_kinds(layer_costs, _stages_of(plan, layer_costs), request.setting)
        return cls(plan, request, stages)

    @property
    def layer_costs(self) -> LayerCosts:
        return self.request.layer_costs

    @property
    def seconds(self) -> float:
        return self.plan.predicted.seconds_per_minibatch

    @property
    def simulated(self) -> bool:
        """Whether the plan's seconds are those of a simulation."""
        return self.plan.predicted.by == "simulation"

    @property
    def problem(self) -> Problem:
        """The problem of pricing the plan and its alternatives."""
        return self.request.problem(self.request.unlimited_budget())

    def price(self) -> Price:
        """Price the plan, with the time, depths and memory that it states: a simulation may have
        chosen others.
        """
        return replace(
            self.problem.price(self.stages),
            seconds_per_minibatch=self.seconds,
            in_flight=tuple(stage.in_flight for stage in self.plan.stages),
            memory=tuple(stage.memory for stage in self.plan.stages),
        )

    def busy_resources(self) -> Sequence[Busy]:
        """Compute the busy seconds per minibatch of each stage's resources."""
        within, groups, _ = self.problem.in_groups(self.stages)
        return busy_resources(within.layer_costs, groups, within.setting)


def _stages_of(plan: Plan, layer_costs: LayerCosts) -> list[Candidate]:
    """Return the stages of a plan as candidates, with ranks where these are not consecutive."""
    ranks = list(dict.fromkeys(rank for stage in plan.stages for rank in stage.ranks))
    consecutive = ranks == list(range(plan.workers))
    before: frozenset[int] = frozenset()
    stages = []
    for stage, in_groups in zip(plan.stages, of_groups(plan).stages, strict=True):
        layers = _positions(layer_costs, stage.layers)
        groups = tuple(_positions(layer_costs, names) for names in stage.recompute_groups)
        plain = StageOptions(stage.replicas, recompute=groups, tensor=stage.ranks_per_replica)
        options = plain.with_sharding(stage.sharding)
        stages.append(Candidate(before, layers, options, () if consecutive else in_groups.ranks))
        before |= layers

    return stages


def _positions(layer_costs: LayerCosts, names: Iterable[str]) -> frozenset[int]:
    return frozenset(layer_costs.position[name] for name in names)


def price(
    profile: Profile,
    cluster: Cluster,
    own: OwnPlan,
    *,
    accepts_loss: bool = False,
    clock: Clock = NO_LIMIT,
) -> Plan:
    """Return the plan of a configuration, priced and simulated: `planner.price` says how.

    Once the clock has passed, it is priced by the cost model alone.
    """
    options = SolveOptions(
        schedule=own.schedule,
        microbatches=own.microbatches,
        depth="published",
        chunks=own.chunks,
    )

    request = Request(profile, cluster_for(profile, cluster), options, clock)
    _check_chunks(own, options.chunks_per_gpu)
    _check_group_sizes(own, cluster)
    _check_versions(own, request.setting.microbatches)
    stages = _candidates(request.layer_costs, own.stages)
    return priced_plan(request, stages, accepts_loss=accepts_loss)


def _check_chunks(own: OwnPlan, chunks: int) -> None:
    if len(own.stages) % chunks:
        raise InputError(
            f"{len(own.stages)} stages are not a multiple of {chunks} chunks per GPU under "
            f"{own.schedule}",
            hint="give as many stages as GPUs in a pipeline, times the chunks",
        )

    if chunks > 1 and len({stage.replicas for stage in own.stages}) > 1:
        raise InputError(
            f"under {own.schedule} all stages have the same number of replicas",
            hint="give `replicas` once for all",
        )


def _check_group_sizes(own: OwnPlan, cluster: Cluster) -> None:
    """Raise ClusterError for groups of several sizes where GPUs or links differ."""
    sizes = [stage.ranks_per_replica for stage in own.stages]
    if len(set(sizes)) == 1:
        return

    where = "on GPUs of several kinds" if cluster.kinds else "on several levels"
    if cluster.kinds or len(cluster.joined) > 1:
        raise ClusterError(
            f"{where} the groups of all stages have one size, and not "
            f"{', '.join(map(str, sizes))} ranks",
            hint="give each stage as many ranks per replica",
        )


def _check_versions(own: OwnPlan, microbatches: int) -> None:
    """Check that the schedule's weight versions suffice; chunked schedules have the depths of whole
    workers.
    """
    if own.schedule.chunked:
        return

    replicas = [stage.replicas for stage in own.stages]
    depths = [
        own.schedule.in_flight(count, after, microbatches)
        for count, after in zip(replicas, gpus_after(replicas), strict=True)
    ]
    check_versions(own.schedule, microbatches, replicas, depths)


def equal_stages(profile: Profile, count: int) -> list[OwnStage]:
    """Divide the model's blocks, or layers if it has none, into equal stages; raise InputError for
    too many.
    """
    blocks = len(_blocks(profile))
    if not 1 <= count <= blocks:
        raise InputError(
            f"'{profile.model}' has {counted(blocks, 'block')}, which do not make "
            f"{counted(count, 'stage')}",
            hint=f"give 1 to {blocks} stages, or name the last layer of each stage but the final "
            f"one",
        )

    return [OwnStage(blocks=each) for each in equal_counts(blocks, count)]


def stages_ending_at(profile: Profile, names: Iterable[str]) -> list[OwnStage]:
    """Cut the profile after each named layer; raise InputError for unknown layers, or for names out
    of order.
    """
    layers = [layer.name for layer in profile.layers]
    ends = [0]
    for name in names:
        if name not in layers:
            message = f"the profile of '{profile.model}' has no layer '{name}'"
            raise InputError(
                message,
                hint=f"{did_you_mean(name, layers)}`plan show` with the profile lists the layers",
            )
        ends.append(layers.index(name) + 1)

    if any(start >= end for start, end in pairwise([*ends, len(layers)])):
        raise InputError(
            f"the stages end after {', '.join(layers[end - 1] for end in ends[1:])}, which is not "
            f"the profile's order "
            "or leaves a stage empty",
            hint="name the last layer of each stage but the final one, in order",
        )

    return [
        OwnStage(layers=tuple(layers[start:end])) for start, end in pairwise([*ends, len(layers)])
    ]


def missing_memory(plan: Plan) -> str | None:
    """Return which stage needs more memory than its GPUs have, and how much; None if all fit."""
    worst = max(range(len(plan.stages)), key=plan.lacking_bytes)
    lacking_bytes = plan.lacking_bytes(worst)
    if not lacking_bytes:
        return None

    needed_bytes = plan.memory_bytes(worst)
    limit = format_memory(needed_bytes - lacking_bytes)
    more = f"{format_bytes(lacking_bytes)} more than {limit}"
    return (
        f"the plan does not fit: stage {worst} needs {format_bytes(needed_bytes)} per GPU, {more}"
    )


def _candidates(layer_costs: LayerCosts, stages: Sequence[OwnStage]) -> list[Candidate]:
    profile = layer_costs.profile
    legal_cuts = set(legal_ends(layer_costs))
    candidates = []
    for stage, layers in zip(stages, _layers_of(profile, stages), strict=True):
        if layers.stop not in legal_cuts:
            raise InputError(
                f"no stage can end after layer '{profile.layers[layers.stop - 1].name}'",
                hint="the profile keeps it in one stage with the next layer",
            )
        again = _recomputing(layer_costs, layers, stage.recompute)
        plain = StageOptions(stage.replicas, recompute=again, tensor=stage.ranks_per_replica)
        options = plain.with_sharding(stage.sharding)
        candidates.append(Candidate(frozenset(range(layers.start)), frozenset(layers), options))

    return candidates


def _layers_of(profile: Profile, stages: Sequence[OwnStage]) -> list[range]:
    """Return the layers of each stage, which are described by numbers of blocks, or by names."""
    by_blocks = stages[0].blocks is not None
    if any((stage.blocks is not None) != by_blocks for stage in stages):
        raise InputError(
            "some stages are described by blocks and some by layers",
            hint="describe all stages in the same way",
        )

    if by_blocks:
        return _layers_by_blocks(profile, [stage.blocks or 0 for stage in stages])

    names = [name for stage in stages for name in stage.layers]
    for name, known in zip_longest(names, (layer.name for layer in profile.layers)):
        if name != known:
            raise InputError(
                f"the stages have the layer '{name}' where the profile of '{profile.model}' has "
                f"'{known}'",
                hint="list all layers, each once, in the profile's order",
            )

    ends = accumulate((len(stage.layers) for stage in stages), initial=0)
    return [range(start, end) for start, end in pairwise(ends)]


def _layers_by_blocks(profile: Profile, counts: Sequence[int]) -> list[range]:
    blocks = _blocks(profile)
    if sum(counts) != len(blocks):
        raise InputError(
            f"the stages have {sum(counts)} blocks, and '{profile.model}' has {len(blocks)}",
            hint=f"give numbers of blocks that add up to {len(blocks)}",
        )

    ends = [0, *(blocks[taken - 1].stop for taken in accumulate(counts))]
    return [range(start, end) for start, end in pairwise(ends)]


def _recomputing(
    layer_costs: LayerCosts, layers: range, recompute: bool | int | Literal["attention"]
) -> Groups:
    if isinstance(recompute, bool):
        return whole_stage(layers, recompute)
    if recompute == "attention":
        return _attention(layer_costs, layers)

    units = units_of(layer_costs, layers)
    if recompute > len(units):
        names = layer_costs.profile.layers
        raise InputError(
            f"{recompute} blocks are to recompute in the stage from '{names[layers[0]].name}' to "
            f"'{names[layers[-1]].name}', which has {len(units)}",
            hint=f"give {len(units)} or fewer; what a stage has of one of the model's blocks "
            f"counts as one",
        )

    return tuple(frozenset(unit) for unit in units[:recompute])


def _attention(layer_costs: LayerCosts, layers: range) -> Groups:
    groups = attention_groups(layer_costs.profile.layers, layers)
    if not groups:
        names = layer_costs.profile.layers
        raise InputError(
            f"the stage from '{names[layers[0]].name}' to '{names[layers[-1]].name}' has no "
            f"attention that could recompute alone",
            hint="give a number of its blocks, such as 1",
        )

    return tuple(groups)


def _blocks(profile: Profile) -> list[range]:
    blocks = blocks_of(profile)
    if len(blocks) > 1:
        return blocks
    return [range(number, number + 1) for number in range(len(profile.layers))]
