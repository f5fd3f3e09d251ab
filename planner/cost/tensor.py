"""Tensor parallelism: a group of t ranks that divides every layer between them, and works as one
device.

A group takes what one rank of it takes, with the all-reduces of its activations, which nothing
overlaps (Shoeybi et al., "Megatron-LM", 2019, section 3). A plan whose stages have groups of one
size is a plan for a cluster of groups.
"""

import math
from collections.abc import Sequence

import numpy as np

from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Link, ring_all_reduce_s
from planner.cost.network.topology import Topology
from planner.cost.work import Floats
from planner.errors import ProfileError
from planner.formats.cluster import Cluster
from planner.formats.names import CODECS
from planner.formats.plan_parts import Exchanged
from planner.formats.profile import DEGREE_COLUMNS, DegreeCosts, Profile
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
    profile: Profile, degree: int, link: Link, *, sequence_parallel: bool = False
) -> Profile:
    """Return the profile of the layers on a group of so many ranks, which all-reduces over this
    link.
    """
    costs = costs_at(profile, degree)
    costs = by_tokens(profile, costs) if sequence_parallel and not costs.by_samples else costs
    forward_s = _with_reduces(
        costs.forward_s, costs.forward_reduced_bytes, costs.forward_reduces, degree, link
    )
    reduced_bytes, reduces = costs.backward_reduced_bytes[::-1], costs.backward_reduces[::-1]
    backward_s = _with_reduces(costs.backward_s[::-1], reduced_bytes, reduces, degree, link)[::-1]
    columns = {name: getattr(costs, name) for name in DEGREE_COLUMNS}
    columns |= {"forward_s": forward_s.tolist(), "backward_s": backward_s.tolist()}
    if sequence_parallel or costs.by_samples:
        sizes = ("output_bytes", "gradient_bytes")
        columns["outputs"] = [
            tuple(
                v.model_copy(update={name: -(-getattr(v, name) // degree) for name in sizes})
                for v in layer.outputs
            )
            for layer in profile.layers
        ]
    layers = (
        layer.model_copy(update=dict(zip(columns, row, strict=True)))
        for layer, *row in zip(profile.layers, *columns.values(), strict=True)
    )
    return profile.model_copy(update={"layers": tuple(layers), "tensor": None})


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
    times = "forward_s", "backward_s", "workspace_bytes"
    columns = {name: list(getattr(costs, name)) for name in (*times, "saved_bytes")}
    for number, layer in enumerate(profile.layers):
        alike = all(
            getattr(layer, name) == getattr(costs, name)[number]
            for name in ("saved_bytes", "weight_bytes")
        )
        if alike and layer.forward_flops:
            continue
        columns["saved_bytes"][number] = -(-layer.saved_bytes // costs.degree)
        if alike and not costs.forward_reduces[number] + costs.backward_reduces[number]:
            for name in times:
                part = getattr(layer, name) / costs.degree
                columns[name][number] = min(
                    columns[name][number], part if name.endswith("_s") else math.ceil(part)
                )
    return costs.model_copy(update={name: tuple(values) for name, values in columns.items()})


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
    many, computed_s, waits_s = np.array(counts, dtype=np.float64), 0.0, list[float]()
    for seconds, count in zip(times_s, counts, strict=True):
        computed_s += seconds
        waits_s.append(min(link.wait_share * computed_s, link.most_wait_s * count))
        computed_s = 0.0 if count else computed_s
    each_bytes = np.array(size_bytes, dtype=np.float64) / np.where(many > 0, many, 1)
    return np.asarray(times_s + many * ring_all_reduce_s(each_bytes, degree, link) + waits_s)


def layer_costs_on(profile: Profile, cluster: Cluster) -> LayerCosts:
    """Return the costs of the profile's layers, with what the cluster does to divided layers and to
    messages.
    """
    topology = Topology(cluster)

    def dividing(each: Profile, degree: int) -> tuple[Profile, Sequence[Exchanged] | None]:
        link, costs = topology.group_link(degree), costs_at(each, degree)
        divided = profile_at(each, degree, link, sequence_parallel=cluster.sequence_parallel)
        # Inside servers that slower links join, messages between servers leave most of the links to
        # the groups.
        if each.lengths is not None or len(topology) > 1 or degree >= topology.gpus:
            return divided, None
        part, rate = 2 * (degree - 1) / degree, link.ring_bytes_per_s
        sizes = zip(costs.forward_reduced_bytes, costs.backward_reduced_bytes, strict=True)
        return divided, [
            Exchanged(forward_bytes=part * f, backward_bytes=part * b, bytes_per_s=rate)
            for f, b in sizes
        ]

    return LayerCosts(
        expected(profile),
        dividing=dividing,
        codec=CODECS[cluster.compress],
        source=profile,
    )
