"""The optimizer offloaded to the host: masters and its state are in the memory of the server, and
its CPU steps them.

Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training", sections 3 and 4. After
the last backward of a minibatch, gradients of G bytes go to the host, the CPU steps H bytes of
masters and states, and W bytes of weights come back. Of a layer

    update     G / link + (2 H + G + W) / step + W / link      seconds

The step reads and writes H, reads G and writes W; that memory bounds it. Nothing overlaps with the
next forward, as DeepSpeed has it unless updates are delayed by a step. DeepSpeed sends gradients
while a backward runs, so that the first term is an upper bound. Replicas that divide the
optimizer's state divide all three terms. The gradients that a GPU sums stay in its memory.
"""

from collections.abc import Iterable

from planner.errors import InputError
from planner.formats.cluster import OptimizerOffload
from planner.formats.files import replace
from planner.formats.profile import DegreeCosts, Layer, Profile

# What a CPU's step moves through the memory of its server: 28 bytes for each of 10 billion
# parameters (masters and two moments in float32, read and written; gradients and weights in
# float16) in 2.57 s, by DeepSpeed's CPU-Adam on the two Xeon Platinum 8168 of a DGX-2 (Ren et al.
# 2021, table 4). Not measured here. Hosts with faster memory step faster.
STEP_BYTES_PER_S = 28 * 10e9 / 2.57


def optimizer_offload(link_bytes_per_s: float, gpus_per_server: int) -> OptimizerOffload:
    """Return the offload to a server whose GPUs all step at once, and share its CPU's rate."""
    return OptimizerOffload(
        link_bytes_per_s=link_bytes_per_s,
        step_bytes_per_s=STEP_BYTES_PER_S / gpus_per_server,
    )


def with_offload(profile: Profile, offload: OptimizerOffload | None) -> Profile:
    """Return the profile of layers whose masters and states are in the memory of the host; as it is
    where they are not.

    Raises:
        InputError: for a CPU, whose memory is the host's, and for several kinds of devices.
    """
    if offload is None:
        return profile

    if profile.device.kind == "cpu":
        raise InputError(
            f"the profile of '{profile.model}' is of a CPU, whose optimizer is in the memory of "
            f"the host already",
            hint="leave out `offload`, or profile on a GPU",
        )

    if profile.kinds:
        raise InputError(
            "`offload` has no price on several kinds of GPUs",
            hint="ask about one kind, or leave out `offload`",
        )

    has_masters = profile.master_weights is not None
    layers = tuple(_offloaded(layer, offload, has_masters) for layer in profile.layers)
    divided = None
    if profile.tensor is not None:
        divided = tuple(_divided(profile, costs, offload) for costs in profile.tensor)
    return replace(profile, layers=layers, tensor=divided)


def host_bytes(profile: Profile, names: Iterable[str], ranks: int, shards: int) -> int:
    """Return what layers hold in the memory of the host, for each GPU.

    Args:
        profile: as it was measured or estimated, with the optimizer on the GPUs.
        names: of the layers; one that is named twice is held twice.
        ranks: that divide the layers.
        shards: replicas that divide the optimizer's state.
    """
    layers = profile.layers
    if ranks > 1:
        costs = next(each for each in profile.tensor or () if each.degree == ranks)
        layers = tuple(costs.applied_to(layers))
    by_name = {layer.name: layer for layer in layers}
    has_masters = profile.master_weights is not None
    whole = sum(_held_bytes(by_name[name], has_masters) for name in names)
    return -(-whole // shards)


def _held_bytes(layer: Layer, has_masters: bool) -> int:
    """Return the bytes of a layer's masters and states. Weights in float32 have no masters on a
    GPU; the host has a copy of them, which the CPU steps.
    """
    if has_masters:
        return layer.optimizer_bytes
    return layer.optimizer_bytes + _trained_bytes(layer)


def _trained_bytes(layer: Layer) -> int:
    """Return the bytes of a layer's trained weights, whose gradients may be summed in float32."""
    return min(layer.weight_bytes, layer.gradient_bytes)


def _offloaded(layer: Layer, offload: OptimizerOffload, has_masters: bool) -> Layer:
    trained_bytes = _trained_bytes(layer)
    sent_bytes = layer.gradient_bytes + trained_bytes
    moved_bytes = 2 * _held_bytes(layer, has_masters) + sent_bytes
    seconds = sent_bytes / offload.link_bytes_per_s + moved_bytes / offload.step_bytes_per_s
    return replace(layer, update_s=seconds, optimizer_bytes=0, update_workspace_bytes=0)


def _divided(profile: Profile, costs: DegreeCosts, offload: OptimizerOffload) -> DegreeCosts:
    """Return the costs of one of the ranks that divide the layers, with its part offloaded."""
    has_masters = profile.master_weights is not None
    layers = [_offloaded(layer, offload, has_masters) for layer in costs.applied_to(profile.layers)]
    by_tokens = costs.by_tokens
    if by_tokens is not None:
        by_tokens = _divided(profile, by_tokens, offload)
    return replace(
        costs,
        update_s=tuple(layer.update_s for layer in layers),
        optimizer_bytes=(0,) * len(layers),
        update_workspace_bytes=(0,) * len(layers),
        by_tokens=by_tokens,
    )
