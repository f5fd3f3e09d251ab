"""Price a configuration that somebody chose by hand: the same costs and the same simulation as for the planner's own.

It answers what a run with Megatron's, DeepSpeed's or one's own stages would give on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise, zip_longest

from planner.analysis.given_plan import check_workers, priced_plan
from planner.cost.candidate import Candidate, Groups, StageOptions, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.recomputation import units_of
from planner.cost.tensor import layer_costs_on
from planner.errors import InputError
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import cluster_for
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.plan.blocks import blocks_of
from planner.plan.shape import check_versions
from planner.schedule.schedule import gpus_after
from planner.solver.choose.baselines import equal_counts, legal_ends
from planner.units import format_bytes, format_memory


def price(profile: Profile, cluster: Cluster, own: OwnPlan) -> Plan:
    """Return the plan of a configuration, priced and simulated.

    Stages take consecutive ranks, and have as many units in flight as the schedule's paper says. The plan may need more
    memory than the GPUs have: `missing_memory` says so.

    Raises:
        ClusterError, ProfileError: for kinds of GPUs, or groups of ranks, that the profile does not know.
        PlanError: for a schedule whose weight versions do not suffice for so many stages.
        InputError: for stages that are not the profile's layers in order, or that need more GPUs than there are.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> halves = planner.OwnPlan(stages=(planner.OwnStage(blocks=20), planner.OwnStage(blocks=3)))
        >>> planner.price(profile, planner.flat_cluster(2, 125e6), halves).config
        '1-1'
    """
    cluster = cluster_for(profile, cluster)
    layer_costs = layer_costs_on(profile, cluster)
    options = SolveOptions(schedule=own.schedule, microbatches=own.microbatches, depth="published", chunks=own.chunks)
    chunks = options.chunks_per_gpu
    if len(own.stages) % chunks:
        raise InputError(
            f"{len(own.stages)} stages are not a multiple of {chunks} chunks per GPU under {own.schedule}",
            hint="give as many stages as GPUs in a pipeline, times the chunks",
        )
    if chunks > 1 and len({stage.replicas for stage in own.stages}) > 1:
        raise InputError(
            f"under {own.schedule} all stages have the same number of replicas", hint="give `replicas` once for all"
        )
    check_workers(sum(stage.replicas * stage.tensor for stage in own.stages) // chunks, cluster)
    microbatches, replicas = options.microbatches_on(cluster, profile), [each.replicas for each in own.stages]
    if not own.schedule.chunked:  # whose depths are those of whole workers
        depths = map(partial(own.schedule.in_flight, microbatches=microbatches), replicas, gpus_after(replicas))
        check_versions(own.schedule, microbatches, replicas, list(depths))
    return priced_plan(options, layer_costs, cluster, _candidates(layer_costs, own.stages))


def equal_stages(profile: Profile, count: int) -> list[OwnStage]:
    """Divide the model's blocks into `count` stages of equal length, the first ones longer by one if need be.

    Of a model without lists of modules, each layer is a block. Raise InputError for fewer blocks than stages.
    """
    blocks = len(_blocks(profile))
    if not 1 <= count <= blocks:
        raise InputError(
            f"'{profile.model}' has {blocks} blocks, too few for {count} stages",
            hint=f"give 1 to {blocks} stages, or name the last layer of each stage but the final one",
        )
    return [OwnStage(blocks=each) for each in equal_counts(blocks, count)]


def stages_ending_at(profile: Profile, names: Iterable[str]) -> list[OwnStage]:
    """Cut the profile after each named layer; raise InputError for unknown layers, or for names out of order."""
    layers = [layer.name for layer in profile.layers]
    ends = [0]
    for name in names:
        if name not in layers:
            raise InputError(
                f"the profile of '{profile.model}' has no layer '{name}'",
                hint="plan show profile.json lists the layers",
            )
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
    return (
        f"the plan does not fit: stage {worst} needs {format_bytes(needed)} per GPU, "
        f"{format_bytes(over[worst])} more than {format_memory(needed - over[worst])}"
    )


def _candidates(layer_costs: LayerCosts, stages: Sequence[OwnStage]) -> list[Candidate]:
    profile = layer_costs.profile
    by_blocks = stages[0].blocks is not None
    if any((stage.blocks is not None) != by_blocks for stage in stages):
        raise InputError(
            "some stages are described by blocks and some by layers", hint="describe all stages in the same way"
        )
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
        raise InputError(
            f"the stages have {sum(counts)} blocks, and '{profile.model}' has {len(blocks)}",
            hint=f"give numbers of blocks that add up to {len(blocks)}",
        )
    ends = [0, *(blocks[count - 1].stop for count in accumulate(counts))]
    groups = [range(start, end) for start, end in pairwise(ends)]
    legal = set(legal_ends(layer_costs))
    found = []
    for stage, layers in zip(stages, groups, strict=True):
        if layers.stop not in legal:
            raise InputError(
                f"no stage can end after layer '{profile.layers[layers.stop - 1].name}'",
                hint="the profile's `no_cut_after` keeps it in one stage with the next layer",
            )
        again = _recomputing(layer_costs, layers, stage.recompute)
        options = StageOptions(stage.replicas, stage.sharded, again, tensor=stage.tensor)
        found.append(Candidate(frozenset(range(layers.start)), frozenset(layers), options))
    return found


def _recomputing(layer_costs: LayerCosts, layers: range, recompute: bool | int) -> Groups:
    """Return the groups of a stage that recompute: the stage itself, or its first units."""
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
