"""Plans and clusters as groups of ranks see them, which divide every layer and work as one
device.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from planner.errors import ClusterError, PlanError
from planner.formats.cluster import Cluster, DeviceKind, Level
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import Profile

Ranks = tuple[int, ...]


def of_groups(plan: Plan) -> Plan:
    """Return the plan of its groups; the plan itself where each is a single rank."""
    if not plan.divides_layers:
        return plan
    leaders = [stage.leaders for stage in plan.stages]
    number = {
        rank: place
        for place, rank in enumerate(sorted({rank for ranks in leaders for rank in ranks}))
    }
    stages = tuple(
        replace(stage, tensor=1, ranks=tuple(number[rank] for rank in ranks))
        for stage, ranks in zip(plan.stages, leaders, strict=True)
    )
    if plan.divides_alike:
        cluster = groups_of(plan.cluster, plan.ranks_per_replica)
    else:
        cluster = plan.cluster

    # its config still says what the groups are
    return replace(plan, stages=stages, cluster=cluster)


def plan_of_tensor_rank(plan: Plan, place: int) -> Plan:
    """Return the plan as the ranks at this place of their groups see it: they receive from ranks of
    the same place.
    """
    stages = (replace(stage, ranks=stage.ranks_at(place), tensor=1) for stage in plan.stages)
    size = plan.microbatch_size and plan.microbatch_size // sample_parts(plan)
    return replace(plan, stages=tuple(stages), microbatch_size=size)


def sample_parts(plan: Plan) -> int:
    """Return into how many parts the ranks of a group divide the samples of a microbatch.

    The plan is that of all ranks: what one rank sees of it does not say how many there are.

    Raises:
        PlanError: where ranks have samples of their own, and no stage has several ranks.
    """
    if not plan.by_samples:
        return 1
    if not plan.divides_layers:
        raise PlanError(
            "the plan gives each rank samples of its own, and no stage has a group of ranks",
            hint="solve again: `plan solve`",
        )
    return plan.ranks_per_replica


def receivers(plan: Plan, stage: int, rank: int, peer_stage: int, peer_rank: int) -> list[int]:
    """Return who takes what a rank of a stage sends to the tensor-parallel group of `peer_rank`, of
    another stage.
    """
    own = plan.stages[stage]
    peer = plan.stages[peer_stage]
    group = peer.group_of(peer_rank)
    return list(group[own.place_of(rank) :: own.ranks_per_replica])


def groups_of_ranks(plan: Plan) -> list[Ranks]:
    """Return the groups that divide layers, each once, in the order of the stages."""
    divided = (stage for stage in plan.stages if stage.divides_layers)
    return list(dict.fromkeys(group for stage in divided for group in stage.rank_groups))


def on_ranks(groups: Sequence[Ranks], degrees: Sequence[int]) -> list[Ranks]:
    """Return the ranks of each stage, which has these groups; groups of several sizes follow one
    another.
    """
    if len(set(degrees)) == 1:
        return [
            tuple(group * degrees[0] + place for group in own for place in range(degrees[0]))
            for own in groups
        ]

    size = {group: degree for own, degree in zip(groups, degrees, strict=True) for group in own}
    order = sorted(size)
    first = dict(zip(order, accumulate((size[group] for group in order), initial=0), strict=False))
    return [
        tuple(first[group] + place for group in own for place in range(size[group]))
        for own in groups
    ]


def usual_degrees(profile: Profile, cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of ranks that may divide layers where nobody says: profiled ones, inside a
    server, and across whole servers those that divide nothing but experts.
    """
    size = cluster.joined[0].size if cluster.joined else 1
    whole = size
    known = {costs.degree for costs in profile.tensor or ()}
    for kind in cluster.kinds:
        size = math.gcd(size, kind.count if kind.speed == 1 else 1)
    for times in profile.kinds or ():
        known &= {costs.degree for costs in times.tensor or ()}
    across = {
        costs.degree
        for costs in profile.tensor or ()
        if costs.alike_bytes is not None
        and not cluster.kinds
        and costs.degree % whole == 0
        and cluster.gpus % costs.degree == 0
    }
    return 1, *(degree for degree in sorted(known) if size % degree == 0 or degree in across)


def groups_of(cluster: Cluster, degree: int) -> Cluster:
    """Return the cluster of groups of so many ranks; raise ClusterError if they do not divide its
    levels evenly.
    """
    kinds = tuple(_kind_of_groups(kind, degree) for kind in cluster.kinds)
    left = degree
    devices = 1
    levels = list[Level]()
    for level in cluster.levels:
        size = level.size // left
        # on a single level some GPUs may be left over
        if level.size % left and (size == 0 or len(cluster.joined) > 1):
            if left % level.size:
                raise ClusterError(
                    f"groups of {degree} ranks do not fill the {level.size} members of a level "
                    f"evenly",
                    hint=f"give degrees in `tensor` that divide {level.size}",
                )
            size = 1
        # Shared links carry the messages of all ranks of a group at once: it has a part for the
        # first of its ranks.
        parts = min(degree, devices) if level.shared else 1
        narrower = replace(
            level, size=size, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / parts
        )
        whole_reduce = level.all_reduce_bandwidth_bytes_per_s
        if whole_reduce is not None:
            narrower = replace(narrower, all_reduce_bandwidth_bytes_per_s=whole_reduce / parts)
        levels.append(narrower)

        left = max(1, left // level.size) if size == 1 else 1
        devices *= level.size

    if left > 1:
        raise ClusterError(
            f"{cluster.gpus} GPUs make no group of {degree} ranks", hint="give a smaller `tensor`"
        )

    return replace(cluster, levels=tuple(levels), kinds=kinds)


def _kind_of_groups(kind: DeviceKind, degree: int) -> DeviceKind:
    """Return a kind whose devices make groups of so many ranks."""
    if kind.speed != 1:
        raise ClusterError(
            f"groups of {degree} ranks need GPUs as fast as the profiled ones, not of {kind.title}",
            hint="solve with `tensor=1`",
        )

    if kind.count % degree:
        raise ClusterError(
            f"{kind.count} GPUs of {kind.title} do not make whole groups of {degree} ranks",
            hint="give degrees in `tensor` that divide the number of GPUs of each kind",
        )

    return replace(kind, count=kind.count // degree)
