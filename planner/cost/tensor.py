"""Tensor parallelism: a group of t ranks that divides every layer between them, and works as one
device.

A group takes what one rank of it takes, with the all-reduces of its activations, which nothing
overlaps (Shoeybi et al., "Megatron-LM", 2019, section 3). A plan whose stages have groups of one
size is a plan for a cluster of groups.
"""

import math
from collections.abc import Sequence

import numpy as np

from planner.cost.context import group_sums_s, waited
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Link, ring_all_reduce_s
from planner.cost.network.topology import Topology
from planner.cost.offload import with_offload
from planner.cost.work import Floats
from planner.errors import ProfileError
from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.device_kinds import profile_of_kinds, profile_on
from planner.formats.files import replace
from planner.formats.names import CODECS
from planner.formats.plan_parts import Exchanged
from planner.formats.profile import DegreeCosts, Layer, Profile, Value
from planner.plan.lengths import expected


def costs_at(profile: Profile, degree: int) -> DegreeCosts:
    """Return what the profile says of the degree; raise ProfileError if that is nothing."""
    known = profile.tensor or ()
    found = next((costs for costs in known if costs.degree == degree), None)
    if found is None:
        says = ", ".join(str(degree) for degree in (1, *(costs.degree for costs in known)))
        raise ProfileError(
            f"the profile of '{profile.model}' does not say what its layers cost on {degree} "
            f"ranks, but on {says}",
            hint=f"measure them: plan profile with `tensor={degree}`; or solve with degrees that "
            f"the profile knows",
        )

    return found


def profile_at(
    profile: Profile,
    degree: int,
    link: Link,
    *,
    sequence_parallel: bool = False,
    exchange: Link | None = None,
) -> Profile:
    """Return the profile of the layers on a group of so many ranks, which all-reduces over this
    link.

    Args:
        profile: with the costs of the degree.
        degree: ranks.
        link: of their all-reduces.
        sequence_parallel: each has a part of the tokens between divided products.
        exchange: the link of their all-to-alls, where they divide experts across servers; None for
            that of all-reduces.
    """
    costs = costs_at(profile, degree)
    if costs.alike_bytes is not None:
        costs = _with_alike_summed(costs, costs.alike_bytes, link)
        link = exchange or link
    if sequence_parallel and not costs.by_samples and not costs.context:
        costs = by_tokens(profile, costs)

    forward_s = _with_reduces(
        costs.forward_s, costs.forward_reduced_bytes, costs.forward_reduces, degree, link
    )
    backward_s = _with_reduces(
        costs.backward_s[::-1],
        costs.backward_reduced_bytes[::-1],
        costs.backward_reduces[::-1],
        degree,
        link,
    )[::-1]
    update_s = np.array(costs.update_s)
    if costs.context:
        forward_s = waited(costs.forward_s, forward_s, costs, profile.layers)
        backward_s = waited(costs.backward_s, backward_s, costs, profile.layers)
        update_s = update_s + group_sums_s(costs, link)

    reduced = replace(
        costs,
        forward_s=tuple(forward_s.tolist()),
        backward_s=tuple(backward_s.tolist()),
        update_s=tuple(update_s.tolist()),
    )
    layers = reduced.applied_to(profile.layers)
    layers = [
        _with_inputs_alone_longer(layer, computed_s)
        for layer, computed_s in zip(layers, costs.backward_s, strict=True)
    ]

    if costs.context:
        layers = [_with_outputs_of_one_rank(layer, costs.context) for layer in layers]
    elif sequence_parallel or costs.by_samples:
        layers = [_with_outputs_of_one_rank(layer, degree) for layer in layers]

    return replace(profile, layers=tuple(layers), tensor=None)


def _with_inputs_alone_longer(layer: Layer, computed_s: float) -> Layer:
    """Return a layer whose backward exchanges activations beside so many seconds of computation:
    the gradients of its weights take no longer for that.
    """
    if layer.backward_s <= computed_s:
        return layer
    computed = replace(layer, backward_s=computed_s)
    return replace(layer, weight_share=computed.backward_weight_s / layer.backward_s)


def _with_alike_summed(costs: DegreeCosts, alike_bytes: Sequence[int], link: Link) -> DegreeCosts:
    """Return the costs with the sum, once per update, of the gradients that all ranks have
    alike.
    """
    summed_s = ring_all_reduce_s(np.array(alike_bytes, dtype=np.float64), costs.degree, link)
    return replace(costs, update_s=tuple((np.array(costs.update_s) + summed_s).tolist()))


def _with_outputs_of_one_rank(layer: Layer, parts: int) -> Layer:
    return replace(layer, outputs=tuple(_of_one_rank(value, parts) for value in layer.outputs))


def _of_one_rank(value: Value, degree: int) -> Value:
    return replace(
        value,
        output_bytes=-(-value.output_bytes // degree),
        gradient_bytes=-(-value.gradient_bytes // degree),
    )


def by_tokens(profile: Profile, costs: DegreeCosts) -> DegreeCosts:
    """Return the costs with sequence parallelism: each rank has a part of the tokens between
    divided products.

    Norms, dropouts and sums that every rank would compute whole take a t-th of the time, and all
    that is saved is divided (Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022, section 4.2). That is for estimates: what was measured so is returned
    as it is.
    """
    if costs.by_tokens is not None:
        return costs.by_tokens
    forward_s = list(costs.forward_s)
    backward_s = list(costs.backward_s)
    workspace_bytes = list(costs.workspace_bytes)
    saved_bytes = list(costs.saved_bytes)
    for number, layer in enumerate(profile.layers):
        held = layer.saved_bytes, layer.weight_bytes
        whole = held == (costs.saved_bytes[number], costs.weight_bytes[number])
        if whole and layer.forward_flops:
            continue

        saved_bytes[number] = -(-layer.saved_bytes // costs.degree)
        if whole and not costs.forward_reduces[number] + costs.backward_reduces[number]:
            part_bytes = math.ceil(layer.workspace_bytes / costs.degree)
            forward_s[number] = min(forward_s[number], layer.forward_s / costs.degree)
            backward_s[number] = min(backward_s[number], layer.backward_s / costs.degree)
            workspace_bytes[number] = min(workspace_bytes[number], part_bytes)

    return replace(
        costs,
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        workspace_bytes=tuple(workspace_bytes),
        saved_bytes=tuple(saved_bytes),
    )


def _with_reduces(
    times_s: Sequence[float],
    size_bytes: Sequence[int],
    counts: Sequence[float],
    degree: int,
    link: Link,
) -> Floats:
    """Return the seconds of layers, in the order in which they run, with their all-reduces and the
    waits for these.
    """
    many = np.array(counts, dtype=np.float64)
    computed_s = 0.0
    waits_s = list[float]()
    for seconds, count in zip(times_s, counts, strict=True):
        computed_s += seconds
        waits_s.append(min(link.wait_share * computed_s, link.most_wait_s * count))
        computed_s = 0.0 if count else computed_s

    each_bytes = np.array(size_bytes, dtype=np.float64) / np.where(many > 0, many, 1)
    return np.asarray(times_s + many * ring_all_reduce_s(each_bytes, degree, link) + waits_s)


def _on_kind(
    profile: Profile, name: str, cluster: Cluster, degree: int
) -> tuple[Profile, int, DeviceKind]:
    """Return the profile on devices of a kind, and the kind as the cluster has it."""
    found = (kind for kind in cluster.kinds if kind.name == name)
    kind = next(found, DeviceKind(name=name, count=1))  # the cluster may have none of them
    return profile_on(profile, kind), degree, kind


def _first_rank(cluster: Cluster, kind: DeviceKind | None) -> int:
    """Return the first rank of a kind of devices; 0 where the cluster has none of them."""
    for each, ranks in zip(cluster.kinds, cluster.kind_ranks, strict=True):
        if kind is not None and (each.name, each.link_ratios) == (kind.name, kind.link_ratios):
            return ranks.start
    return 0


def layer_costs_on(profile: Profile, cluster: Cluster) -> LayerCosts:
    """Return the costs of the profile's layers, with what the cluster does to divided layers and to
    messages.
    """
    topology = Topology(cluster)

    def dividing(
        each: Profile, degree: int, kind: DeviceKind | None
    ) -> tuple[Profile, Sequence[Exchanged] | None]:
        if each.kinds:
            own = {
                times.name: dividing(*_on_kind(each, times.name, cluster, degree))[0]
                for times in each.kinds
            }
            return profile_of_kinds(own), None

        link = topology.group_link(degree, _first_rank(cluster, kind))
        costs = costs_at(each, degree)
        divided = profile_at(
            each,
            degree,
            link,
            sequence_parallel=cluster.sequence_parallel,
            exchange=topology.exchange_link(degree, _first_rank(cluster, kind), costs.copies),
        )
        # Inside servers that slower links join, messages between servers leave most of the links to
        # the groups.
        if each.lengths is not None or len(topology) > 1 or degree >= topology.gpus:
            return divided, None
        part = 2 * (degree - 1) / degree
        rate = link.ring_bytes_per_s
        sizes = zip(costs.forward_reduced_bytes, costs.backward_reduced_bytes, strict=True)
        return divided, [
            Exchanged(forward_bytes=part * f, backward_bytes=part * b, bytes_per_s=rate)
            for f, b in sizes
        ]

    return LayerCosts(
        with_offload(expected(profile), cluster.offload),
        dividing=dividing,
        codec=CODECS[cluster.compress],
        source=profile,
    )
