"""What layers cost where c ranks divide the sequences of a microbatch between them.

    F, Bw         1/c of the whole layer's, and for attention also what is waited for
    saved, sent   1/c
    weights       whole, on each rank: their gradients are summed over the group with every update

In a forward each rank needs the keys and values of all others: (c-1)/c of their bytes arrive, while
it attends to those that it has. In a backward as many arrive again, and their gradients are sent
back. So with `x` seconds for messages and `a` for attention, both of one rank,

    attention takes   a + max(0, x - (c-1)/c·a)

which is that of a ring with c steps, the first of which needs no message (Liu et al., "Ring
Attention", 2023, section 3). Compute is divided evenly: a rank has tokens from both ends of a
sequence (Llama 3, 2024, section 3.3.2).

Not priced: products of fewer rows that fill a GPU less, and all-to-alls in place of the ring, with
which `plan train` works: of queries, keys, values and results each rank sends (c-1)/c of its own
part, 1/c of the whole, forth in a forward and back in a backward.
"""

from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

import numpy as np

from planner.cost.network.link import Link, ring_all_reduce_s
from planner.cost.work import Floats
from planner.errors import ProfileError
from planner.formats.files import replace
from planner.formats.profile import DegreeCosts, Layer, Profile

ATTENTION = "scaled_dot_product_attention"
# Of what arrives in a forward, what is sent in a backward: keys and values again, and gradients.
_BACKWARD_PARTS = 2


def with_context(
    profile: Profile, context: Collection[int], tensor: Collection[int] = (1,)
) -> Profile:
    """Return the profile with the costs of layers whose sequences so many ranks divide.

    A profile has one entry for each size of groups: of two that make groups of one size, the first
    counts.

    Args:
        profile: of whole sequences.
        context: numbers of ranks that may divide each sequence.
        tensor: of ranks that divide the layers as well, of degrees that the profile has; those that
            divide experts are left out. Groups have as many ranks as both multiplied.

    Raises:
        ProfileError: for a model in which no attention is seen, kinds of devices, or batches of
            several lengths.
    """
    attention = _attention_bytes(profile)
    asked = ",".join(map(str, context))
    if not attention:
        raise ProfileError(
            f"no layer of '{profile.model}' is {ATTENTION}, so how tokens depend on each other is "
            f"not known, and `context={asked}` cannot be priced",
            hint="let the model use torch.nn.functional.scaled_dot_product_attention, or leave "
            "`context` out",
        )

    if profile.kinds or profile.lengths is not None:
        varied = "GPUs of several kinds" if profile.kinds else "batches of several lengths"
        raise ProfileError(
            f"`context={asked}` is not priced for {varied}",
            hint="leave `context` out",
        )

    known = {
        costs.degree: costs
        for costs in profile.tensor or ()
        if not (costs.by_samples or costs.experts or costs.context)
    }
    whole = _undivided(profile.layers)
    by_ranks: dict[int, DegreeCosts] = {}
    for ranks, degree in product(sorted(set(context) - {1}), sorted(set(tensor))):
        if degree == 1 or degree in known:
            costs = _of_part(known.get(degree, whole), ranks, degree, attention)
            by_ranks.setdefault(costs.degree, costs)

    return replace(profile, tensor=tuple(by_ranks[ranks] for ranks in sorted(by_ranks)) or None)


def waited(
    seconds: Sequence[float], with_messages_s: Floats, costs: DegreeCosts, layers: Sequence[Layer]
) -> Floats:
    """Return layers' seconds with what attention waits for, in place of all of its messages.

    Args:
        seconds: of one rank, without messages.
        with_messages_s: the same with all messages, none of which is hidden.
        costs: whose sequences are divided.
        layers: of the profile.
    """
    own_s = np.array(seconds, dtype=np.float64)
    hiding = np.array([is_attention(layer) for layer in layers])
    hidden_s = own_s * ((costs.context or 1) - 1) / (costs.context or 1)
    exposed_s = np.maximum(0.0, with_messages_s - own_s - hidden_s)
    return np.where(hiding, own_s + exposed_s, with_messages_s)


def group_sums_s(costs: DegreeCosts, link: Link) -> Floats:
    """Return the seconds, by layer, in which a group sums its gradients: once per update."""
    sizes = np.array(costs.gradient_bytes, dtype=np.float64)
    all_bytes = sizes.sum()
    if not costs.context or not all_bytes:
        return np.zeros_like(sizes)
    seconds = ring_all_reduce_s(all_bytes, costs.context, link)
    return np.asarray(seconds * sizes / all_bytes)


def has_attention(profile: Profile) -> bool:
    """Return whether context parallelism can be priced: attention is seen, and its lengths are
    one.
    """
    return profile.lengths is None and any(map(is_attention, profile.layers))


def is_attention(layer: Layer) -> bool:
    """Return whether tokens look at each other in a layer."""
    return ATTENTION in layer.op


def _attention_bytes(profile: Profile) -> dict[int, float]:
    """Return the bytes of keys and values of a microbatch, by the number of the attention layer."""
    outputs = {
        (layer.name, value.name): value for layer in profile.layers for value in layer.outputs
    }
    entering: dict[str, list[int]] = {}
    for edge in profile.edges:
        value = outputs[edge.source, edge.value]
        if value.gradient_bytes:  # masks and positions have none
            entering.setdefault(edge.target, []).append(value.output_bytes)

    return {
        number: _keys_and_values(entering.get(layer.name, []))
        for number, layer in enumerate(profile.layers)
        if is_attention(layer)
    }


def _keys_and_values(sizes: Sequence[int]) -> float:
    """Return the bytes of keys and values among what enters attention.

    Keys and values are never larger than queries. Where one value has all three, they are two
    thirds of it or less.
    """
    if len(sizes) >= 3:
        return float(sum(sorted(sizes)[-3:-1]))
    return sum(sizes) * 2 / 3


def _undivided(layers: Sequence[Layer]) -> DegreeCosts:
    """Return the profile's own costs in the form of those of divided layers."""
    names = (
        "forward_s",
        "backward_s",
        "update_s",
        "accumulate_s",
        "workspace_bytes",
        "update_workspace_bytes",
        "weight_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "buffer_bytes",
        "saved_bytes",
    )
    none = (0,) * len(layers)
    values: dict[str, Any] = {name: tuple(getattr(each, name) for each in layers) for name in names}
    # Not validated: a degree of 1 is in no profile.
    return DegreeCosts.model_construct(
        source="estimated",
        degree=1,
        forward_reduced_bytes=none,
        backward_reduced_bytes=none,
        forward_reduces=(0.0,) * len(layers),
        backward_reduces=(0.0,) * len(layers),
        by_tokens=None,
        **values,
    )


def _of_part(
    costs: DegreeCosts, context: int, degree: int, attention: dict[int, float]
) -> DegreeCosts:
    """Return the costs of `degree` ranks that divide layers, times `context` that divide sequences.

    Messages are priced as all-reduces over the whole group, of which a rank passes on 2(g-1)/g of
    the bytes: amounts are scaled so that it passes on what it does in its own smaller group.
    """
    ranks = context * degree
    whole_group = (ranks - 1) / ranks
    tensor_scale = (degree - 1) / degree / whole_group / context
    context_scale = (context - 1) / context / whole_group / degree

    def reduced(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
        return tuple(
            round(tensor_scale * size + context_scale * parts * attention.get(number, 0.0) / 2)
            for number, size in enumerate(sizes)
        )

    def counted(counts: Sequence[float], parts: int) -> tuple[float, ...]:
        # A gather of keys and one of values, each half of an all-reduce.
        return tuple(count + parts * (number in attention) for number, count in enumerate(counts))

    def divided(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value / context for value in values)

    def parts_of(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(-(-size // context) for size in sizes)

    return DegreeCosts(
        **{
            **{name: getattr(costs, name) for name in _KEPT},
            "source": "estimated",
            "degree": ranks,
            "context": context,
            "forward_s": divided(costs.forward_s),
            "backward_s": divided(costs.backward_s),
            "workspace_bytes": parts_of(costs.workspace_bytes),
            "saved_bytes": parts_of(costs.saved_bytes),
            "forward_reduced_bytes": reduced(costs.forward_reduced_bytes, 1),
            "backward_reduced_bytes": reduced(costs.backward_reduced_bytes, _BACKWARD_PARTS),
            "forward_reduces": counted(costs.forward_reduces, 1),
            "backward_reduces": counted(costs.backward_reduces, _BACKWARD_PARTS),
        }
    )


# What every rank of a group has as if it were alone.
_KEPT = (
    "update_s",
    "accumulate_s",
    "update_workspace_bytes",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "buffer_bytes",
)
