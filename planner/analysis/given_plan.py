"""Price a plan that is given, by a file or as stages that somebody chose by hand, in the terms of the solver."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, zip_longest

from planner.cost.candidate import Candidate, Groups, StageOptions, whole_stage
from planner.cost.kinds import with_kinds
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.topology import Busy
from planner.cost.overheads import Price
from planner.cost.pricing import busy_resources
from planner.cost.recomputation import units_of
from planner.cost.tensor import layer_costs_on
from planner.errors import InputError, PlanError, did_you_mean
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import cluster_for
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.plan_parts import why_whole
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.plan.blocks import blocks_of
from planner.plan.rank_groups import of_groups
from planner.plan.same_model import check_same_model
from planner.plan.shape import check_versions
from planner.schedule.schedule import gpus_after
from planner.solver.assemble import GIVEN, complete
from planner.solver.choose.baselines import equal_counts, legal_ends
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.problem.budget import Budget, Patience
from planner.solver.problem.problem import Problem
from planner.solver.question import options_of, problem_of, setting_of
from planner.units import counted, format_bytes, format_memory


def priced_plan(options: SolveOptions, layer_costs: LayerCosts, cluster: Cluster, stages: Sequence[Candidate]) -> Plan:
    """Return the plan of these stages, priced and simulated, whether or not they fit the memory.

    Raise InputError if the cluster has fewer GPUs than stages need.
    """
    needed = sum(stage.options.gpus for stage in stages) // options.chunks_per_gpu
    if needed > cluster.gpus:
        message = f"the stages need {counted(needed, 'GPU')}, and the cluster has {cluster.gpus}"
        raise InputError(message, hint=f"give `gpus={needed}` or more")
    if any(stage.options.level > 1 for stage in stages):
        counts, setting = [stage.replicas for stage in stages], setting_of(options, layer_costs.profile, cluster)
        degrees = [stage.options.tensor for stage in stages]
        if whole := why_whole(setting.schedule, setting.microbatches, counts, degrees):
            raise InputError(whole[0], hint=whole[1])
    # A plan that does not fit has a price, too.
    problem = problem_of(options, layer_costs, cluster.with_memory(lambda _: None))
    return complete(problem, evaluate(problem, stages), GIVEN).model_copy(update={"cluster": cluster})


@dataclass(frozen=True)
class GivenPlan:
    """A plan, the profile it was made from, and the options it was solved with."""

    layer_costs: LayerCosts
    plan: Plan
    options: SolveOptions  # under which it and its alternatives are priced
    stages: tuple[Candidate, ...]
    patience: Patience  # of everything that is solved or simulated, together

    @classmethod
    def of(
        cls, profile: Profile, plan: Plan, options: SolveOptions | None = None, patience: Patience | None = None
    ) -> "GivenPlan":
        """Prepare `plan`, with the options that it records by default; raise PlanError if its profile is another."""
        layer_costs = layer_costs_on(profile, plan.cluster)
        if plan.profile_digest != profile.digest:
            message = f"the plan was made from another profile of '{plan.model}' than this one of '{profile.model}'"
            raise PlanError(message, hint="give the plan's own `profile`, or solve again")
        check_same_model(plan, list(layer_costs.position), profile.edges)
        in_order = dict.fromkeys(rank for stage in plan.stages for rank in stage.ranks)
        as_usual = list(in_order) == list(range(plan.workers))
        before: frozenset[int] = frozenset()
        stages = []
        for stage, own in zip(plan.stages, of_groups(plan).stages, strict=True):
            layers = frozenset(layer_costs.position[name] for name in stage.layers)
            groups = (frozenset(layer_costs.position[name] for name in names) for names in stage.recompute_groups)
            how = StageOptions(stage.replicas, stage.level, tuple(groups), tensor=stage.tensor)
            stages.append(Candidate(before, layers, how, () if as_usual else own.ranks))
            before |= layers
        placed = with_kinds(layer_costs, stages, setting_of(options_of(plan), profile, plan.cluster))
        options = options or options_of(plan)
        patience = patience or Patience.of(options.time_limit_s, options.progress)
        return cls(layer_costs, plan, options, placed, patience)

    @property
    def seconds(self) -> float:
        return self.plan.predicted.seconds_per_minibatch

    @property
    def simulated(self) -> bool:
        """Whether the plan's seconds are those of a simulation."""
        return self.plan.predicted.by == "simulation"

    def within(self, share: float) -> "GivenPlan":
        """Return the plan with this share of the time that is left for what is solved."""
        return replace(self, patience=self.patience.part(share))

    def price(self) -> Price:
        """Price the plan, with the time, depths and memory that it states: a simulation may have chosen others."""
        return replace(
            self._as_recorded.price(self.stages),
            seconds_per_minibatch=self.seconds,
            in_flight=tuple(stage.in_flight for stage in self.plan.stages),
            memory=tuple(stage.memory for stage in self.plan.stages),
        )

    @property
    def problem(self) -> Problem:
        """The problem of pricing the plan and its alternatives."""
        return problem_of(self.options, self.layer_costs, self.plan.cluster, Budget.unlimited(self.patience.deadline))

    @property
    def _as_recorded(self) -> Problem:
        return problem_of(options_of(self.plan), self.layer_costs, self.plan.cluster)

    def busy_resources(self) -> Sequence[Busy]:
        """Compute the busy seconds per minibatch of each stage's resources."""
        within, groups, _ = self._as_recorded.in_groups(self.stages)
        return busy_resources(within.layer_costs, groups, within.setting)


def price(profile: Profile, cluster: Cluster, own: OwnPlan) -> Plan:
    """Return the plan of a configuration, priced and simulated: `planner.price` says how."""
    cluster = cluster_for(profile, cluster)
    layer_costs = layer_costs_on(profile, cluster)
    options = SolveOptions(schedule=own.schedule, microbatches=own.microbatches, depth="published", chunks=own.chunks)
    chunks = options.chunks_per_gpu
    if len(own.stages) % chunks:
        message = f"{len(own.stages)} stages are not a multiple of {chunks} chunks per GPU under {own.schedule}"
        raise InputError(message, hint="give as many stages as GPUs in a pipeline, times the chunks")
    if chunks > 1 and len({stage.replicas for stage in own.stages}) > 1:
        message = f"under {own.schedule} all stages have the same number of replicas"
        raise InputError(message, hint="give `replicas` once for all")
    microbatches, replicas = options.microbatches_on(cluster, profile), [each.replicas for each in own.stages]
    if not own.schedule.chunked:  # whose depths are those of whole workers
        depths = map(partial(own.schedule.in_flight, microbatches=microbatches), replicas, gpus_after(replicas))
        check_versions(own.schedule, microbatches, replicas, list(depths))
    return priced_plan(options, layer_costs, cluster, _candidates(layer_costs, own.stages))


def equal_stages(profile: Profile, count: int) -> list[OwnStage]:
    """Divide the model's blocks, or layers if it has none, into equal stages; raise InputError for too many."""
    blocks = len(_blocks(profile))
    if not 1 <= count <= blocks:
        raise InputError(
            f"'{profile.model}' has {counted(blocks, 'block')}, which do not make {counted(count, 'stage')}",
            hint=f"give 1 to {blocks} stages, or name the last layer of each stage but the final one",
        )
    return [OwnStage(blocks=each) for each in equal_counts(blocks, count)]


def stages_ending_at(profile: Profile, names: Iterable[str]) -> list[OwnStage]:
    """Cut the profile after each named layer; raise InputError for unknown layers, or for names out of order."""
    layers = [layer.name for layer in profile.layers]
    ends = [0]
    for name in names:
        if name not in layers:
            message = f"the profile of '{profile.model}' has no layer '{name}'"
            raise InputError(message, hint=f"{did_you_mean(name, layers)}`plan show` with the profile lists the layers")
        ends.append(layers.index(name) + 1)
    if any(start >= end for start, end in pairwise([*ends, len(layers)])):
        raise InputError(
            f"the stages end after {', '.join(layers[end - 1] for end in ends[1:])}, which is not the profile's order "
            "or leaves a stage empty",
            hint="name the last layer of each stage but the final one, in order",
        )
    return [OwnStage(layers=tuple(layers[start:end])) for start, end in pairwise([*ends, len(layers)])]


def missing_memory(plan: Plan) -> str | None:
    """Return which stage needs more memory than its GPUs have, and how much; None if all fit."""
    over = [plan.lacking_bytes(number) for number in range(len(plan.stages))]
    worst = max(range(len(over)), key=over.__getitem__)
    if not over[worst]:
        return None
    needed = plan.memory_bytes(worst)
    more = f"{format_bytes(over[worst])} more than {format_memory(needed - over[worst])}"
    return f"the plan does not fit: stage {worst} needs {format_bytes(needed)} per GPU, {more}"


def _candidates(layer_costs: LayerCosts, stages: Sequence[OwnStage]) -> list[Candidate]:
    profile = layer_costs.profile
    by_blocks = stages[0].blocks is not None
    if any((stage.blocks is not None) != by_blocks for stage in stages):
        message = "some stages are described by blocks and some by layers"
        raise InputError(message, hint="describe all stages in the same way")
    counts = [stage.blocks or len(stage.layers) for stage in stages]
    blocks = _blocks(profile) if by_blocks else [range(number, number + 1) for number in range(len(profile.layers))]
    named = [name for stage in stages for name in stage.layers]
    for name, known in zip_longest(named, layer_costs.position):
        if not by_blocks and name != known:
            raise InputError(
                f"the stages have the layer '{name}' where the profile of '{profile.model}' has '{known}'",
                hint="list all layers, each once, in the profile's order",
            )
    if sum(counts) != len(blocks):
        message = f"the stages have {sum(counts)} blocks, and '{profile.model}' has {len(blocks)}"
        raise InputError(message, hint=f"give numbers of blocks that add up to {len(blocks)}")
    ends = [0, *(blocks[count - 1].stop for count in accumulate(counts))]
    groups = [range(start, end) for start, end in pairwise(ends)]
    legal = set(legal_ends(layer_costs))
    found = []
    for stage, layers in zip(stages, groups, strict=True):
        if layers.stop not in legal:
            message = f"no stage can end after layer '{profile.layers[layers.stop - 1].name}'"
            raise InputError(message, hint="the profile keeps it in one stage with the next layer")
        again = _recomputing(layer_costs, layers, stage.recompute)
        options = StageOptions(stage.replicas, stage.level, again, tensor=stage.tensor)
        found.append(Candidate(frozenset(range(layers.start)), frozenset(layers), options))
    return found


def _recomputing(layer_costs: LayerCosts, layers: range, recompute: bool | int) -> Groups:
    if isinstance(recompute, bool):
        return whole_stage(layers, recompute)
    units = units_of(layer_costs, layers)
    if recompute > len(units):
        names = layer_costs.profile.layers
        raise InputError(
            f"{recompute} blocks are to recompute in the stage from '{names[layers[0]].name}' to "
            f"'{names[layers[-1]].name}', which has {len(units)}",
            hint=f"give {len(units)} or fewer; what a stage has of one of the model's blocks counts as one",
        )
    return tuple(frozenset(unit) for unit in units[:recompute])


def _blocks(profile: Profile) -> list[range]:
    blocks = blocks_of(profile)
    return blocks if len(blocks) > 1 else [range(number, number + 1) for number in range(len(profile.layers))]
