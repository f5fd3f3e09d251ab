"""Price a stage that is the whole model, and whose replicas divide more than the optimizer's state:
ZeRO-2 and ZeRO-3.

Every GPU computes the whole model. With r GPUs, k microbatches on each between two updates, W bytes
of weights, G of gradients, O of the optimizer's state (Rajbhandari et al. 2020, section 5, figure
1; level 3 is FSDP):

    level   each GPU keeps        and exchanges in an update
    1       W + G + O/r           gradients once (reduce-scatter), weights once (all-gather)
    2       W + (W + G + O)/r     gradients k times, because nobody keeps their sum; weights once
    3       (W + G + O)/r         gradients k times, weights 2k times: before each forward and each
                                  backward

A reduce-scatter and an all-gather are the halves of a ring all-reduce, (r-1)/r of the bytes each
(section 7). PyTorch's `fully_shard` divides the model into units, here its blocks, with their
experts apart, and what recomputes together. A GPU holds besides the gradients of the unit that
runs, twice, and at level 3 the weights of two units: one runs, the next is on its way. At level 2
its part of the weights is not one with the gathered ones. Weights that several units use stay as
long as the whole model runs.

Groups of g replicas may divide what there is, and repeat each other (HSDP:
`planner.stages.sharding`). Then g takes the place of r above, over the links inside a group, and
between two updates the r/g replicas that have the same part of the gradients all-reduce it once.
All g parts do so at once, over the links that GPUs of a server share.

A replica may be a group of t ranks that divide every layer (2-D). Each of them gathers and scatters
its own part of the layers with the ranks that have the same part in other replicas: t times less,
over the links that the ranks of a server share. So it is priced on the cluster of groups
(`planner.cost.tensor`), with W, G and O those of a rank. Where the ranks divide experts alone, what
all of them have alike is gathered as if each gathered it from its own replicas.

Exchanges overlap with the computation beside them, except for the first part of the weights or the
last of the gradients, and for the weights after an update. On CPUs nothing overlaps, for
`fully_shard` has no streams there; what an exchange adds to the computations around it is measured
there by `planner.profiler.links`. Level 1 may be in any stage of a plan: see `planner.cost.models`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.communicators import with_overheads
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import BUCKETS, Buckets, Link, link_of, ring_all_reduce_s
from planner.cost.network.topology import Topology, places_matter
from planner.cost.overheads import Price
from planner.cost.setting import Setting
from planner.cost.weight_copies import buckets_in
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan_parts import StageMemory
from planner.plan.blocks import sharded_units
from planner.plan.rank_groups import groups_of
from planner.plan.shared_weights import shared_weights, trained_parameters


@dataclass(frozen=True)
class ShardedTimes:
    """Seconds of a replica with the exchanges that it waits for."""

    forward_s: float  # of a microbatch
    backward_s: float  # without what recomputes
    accumulate_s: float
    update_s: float


def sharded_times(layer_costs: LayerCosts, stage: Candidate, setting: Setting) -> ShardedTimes:
    """Compute the seconds of a stage of level 2 or 3; raise ClusterError for groups that do not
    fill the cluster's.
    """
    layer_costs, stage, setting = _of_groups(layer_costs, stage, setting)
    work = layer_costs.work(stage)
    cluster = setting.cluster
    shards = stage.options.shards

    # 1. Each unit has an exchange of its own, with the latencies of its steps.
    ranks = (stage.ranks or range(stage.replicas))[:shards]
    topology = Topology(cluster)
    if places_matter(cluster):
        link = topology.stage_link(ranks)
    else:
        link = link_of(cluster)

    units = _unit_bytes(layer_costs, stage)
    share = float(work.trainable_bytes) / max(1, sum(units))
    gradients = [size * share for size in units]
    gather_s = _half_rings_s(units, shards, topology.measured_link(ranks, "gather") or link)
    scatter_s = _half_rings_s(gradients, shards, topology.measured_link(ranks, "scatter") or link)
    overlaps = link.overlap and layer_costs.profile.device.kind != "cpu"

    # 2. Weights are gathered after the update; or before forward and backward, where they are
    # sharded, too. Nothing of a forward can run before the first part.
    forward_s = float(work.forward_s)
    after_s = gather_s
    exchange_s = scatter_s
    if stage.options.shards_weights:
        after_s = 0.0
        exchange_s = scatter_s + gather_s
        gathered_s = forward_s + gather_s
        if overlaps:
            gathered_s = max(forward_s + gather_s / BUCKETS, gather_s)
        forward_s = gathered_s

    # 3. Gradients are exchanged beside the backward, or after it.
    buckets = buckets_in(layer_costs, stage, ())
    last_s = buckets.ready_s[-1]
    if overlaps:
        ended_s = buckets.reduced_s(exchange_s)
    else:
        ended_s = last_s + exchange_s

    if stage.options.repeats_shards:
        repeated_s = _repeated_s([size / shards for size in gradients], stage, cluster)
        after_s += _after_last_s(buckets, exchange_s, repeated_s) if overlaps else repeated_s

    # 4. Each GPU accumulates and updates its part alone.
    return ShardedTimes(
        forward_s=forward_s,
        backward_s=float(work.backward_s) + ended_s - last_s,
        accumulate_s=float(work.accumulate_s) / shards,
        update_s=float(work.update_s) / shards + after_s,
    )


def _of_groups(
    layer_costs: LayerCosts, stage: Candidate, setting: Setting
) -> tuple[LayerCosts, Candidate, Setting]:
    """Return a stage whose replicas are groups of ranks as one of the cluster of groups."""
    degree = stage.options.ranks_per_replica
    if degree == 1:
        return layer_costs, stage, setting
    ranks = tuple(rank // degree for rank in stage.ranks[::degree])
    return (
        layer_costs.at_degree(degree),
        replace(stage, options=replace(stage.options, tensor=1), ranks=ranks),
        replace(setting, cluster=groups_of(setting.cluster, degree)),
    )


def _half_rings_s(sizes_bytes: Iterable[float], shards: int, link: Link) -> float:
    """Return the seconds of gathers or scatters: each takes half of an all-reduce."""
    return sum(float(ring_all_reduce_s(each, shards, link)) / 2 for each in sizes_bytes)


def _repeated_s(parts_bytes: Iterable[float], stage: Candidate, cluster: Cluster) -> float:
    """Return the seconds in which a GPU all-reduces its parts with those that have the same, beside
    the others.
    """
    copies = stage.options.copies
    # For one of each group's GPUs the groups are a cluster of their own, with its part of the links
    # that they share.
    link = Topology(groups_of(cluster, stage.options.shards)).stage_link(range(copies))
    return sum(float(ring_all_reduce_s(each, copies, link)) for each in parts_bytes)


def _after_last_s(buckets: Buckets, exchange_s: float, repeated_s: float) -> float:
    """Return by how much all-reduces end later than what they wait for: a bucket's gradients,
    summed in its group.
    """
    summed_s = repeated_until_s = 0.0
    for at_s, share in zip(buckets.ready_s, buckets.shares, strict=True):
        summed_s = max(summed_s, at_s) + exchange_s * share
        repeated_until_s = max(repeated_until_s, summed_s) + repeated_s * share
    return repeated_until_s - summed_s


def fully_sharded(
    layer_costs: LayerCosts, stage: Candidate, setting: Setting, whole: Price
) -> Price:
    """Return the price of a stage of level 2 or 3, given that of the same stage of level 1."""
    layer_costs, stage, setting = _of_groups(layer_costs, stage, setting)
    times = sharded_times(layer_costs, stage, setting)
    work = layer_costs.work(stage)
    options = stage.options

    # microbatches on each GPU between two updates
    each = -(-setting.microbatches // options.replicas)
    seconds = each * (times.forward_s + float(work.recompute_s) + times.backward_s)
    seconds += (each - 1) * times.accumulate_s + times.update_s

    units = _unit_bytes(layer_costs, stage)
    gathers = 2 * each if options.shards_weights else 1
    per_microbatch_bytes = each * float(work.trainable_bytes)
    in_groups_bytes = (options.shards - 1) * (per_microbatch_bytes + gathers * sum(units))
    between_bytes = 2 * (options.copies - 1) * float(work.trainable_bytes)

    masters = layer_costs.profile.master_weights is not None
    memory = _held(whole.memory[0], units, options, masters=masters)
    return replace(
        whole,
        seconds_per_minibatch=seconds,
        bottleneck=replace(whole.bottleneck, busy_s=seconds),
        memory=with_overheads(layer_costs, [stage], [memory], [0]),
        communication_bytes=options.copies * in_groups_bytes + between_bytes,
    )


def _held(
    whole: StageMemory, units: Sequence[int], options: StageOptions, *, masters: bool
) -> StageMemory:
    """Return the memory of a stage of level 2 or 3, given that of level 1 and its units' bytes.

    Masters are all that is kept of weights in half precision, whose gradients are summed in
    float32, beside them.
    """
    weights_bytes = whole.weights_bytes
    part_bytes = 0 if masters else -(-weights_bytes // options.shards)
    gathered_bytes = weights_bytes
    if options.shards_weights:
        # the unit at work, and the next one
        *own, shared_bytes = units
        gathered_bytes = min(max(map(sum, pairwise([*own, 0]))) + shared_bytes, weights_bytes)

    part_of_gradients_bytes = -(-whole.gradients_bytes // options.shards)
    unit_gradients_bytes = min((2 + masters) * max(units), whole.gradients_bytes)
    return replace(
        whole,
        weights_bytes=part_bytes + gathered_bytes,
        gradients_bytes=part_of_gradients_bytes + unit_gradients_bytes,
    )


def _unit_bytes(layer_costs: LayerCosts, stage: Candidate) -> Sequence[int]:
    """Return the bytes of each unit's own weights, and last of those that several units use."""
    profile = layer_costs.profile
    names = [layer.name for layer in profile.layers]
    groups = [[names[layer] for layer in sorted(group)] for group in stage.options.recompute]
    units = sharded_units(names, groups)
    # A weight is counted in the first layer that has it.
    shared = {weight.layers[0] for weight in shared_weights(units, trained_parameters(profile))}

    size_of = {layer.name: layer.weight_bytes for layer in profile.layers}
    sizes = []
    for unit in units:
        own = set(unit) - shared
        sizes.append(sum(size_of[name] for name in own))

    return [*sizes, sum(size_of[name] for name in shared)]
