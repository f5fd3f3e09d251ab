"""A frozen base in 4 bits, beside which adapters are trained (QLoRA), as bitsandbytes runs it.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3. The frozen weights
of the linear layers that have adapters are kept as 4-bit NormalFloat, and each product makes them
half precision again first:

    bits per weight = 4 + 8 / 64 + 32 / (64 · 256) = 4.127   double quantization, 64 and 256 a block
    forward, backward: + weights · (4.127 / 8 + 2) bytes / (bandwidth · share of pointwise kernels)

The weights in half precision exist for one layer at a time. What has no adapters, such as the
embedding, the norms and the head, stays as it is. No kernel of this kind was measured here.
"""

from typing import Literal

from planner.formats.files import replace
from planner.formats.profile import Layer, Profile
from planner.profiler.estimated.devices import DeviceSpec

BITS: Literal[4] = 4
BITS_PER_WEIGHT = BITS + 8 / 64 + 32 / (64 * 256)
HALF_BYTES = 2
# How peft calls the layer that an adapter is beside.
_BASE = ".base_layer"


def with_quantized_base(profile: Profile, spec: DeviceSpec) -> Profile:
    """Return the profile with the frozen layers that have adapters in 4 bits.

    Args:
        profile: of a model with adapters, whose frozen weights are in half precision.
        spec: the device that it was estimated for.
    """
    layers = tuple(
        _quantized(layer, spec) if _has_adapters(layer) else layer for layer in profile.layers
    )
    return replace(profile, layers=layers, base_bits=BITS)


def _has_adapters(layer: Layer) -> bool:
    return layer.name.endswith(_BASE) and not layer.gradient_bytes


def _quantized(layer: Layer, spec: DeviceSpec) -> Layer:
    weights = layer.weight_bytes // HALF_BYTES
    stored_bytes = round(weights * BITS_PER_WEIGHT / 8)
    moved_bytes = stored_bytes + HALF_BYTES * weights
    rate = spec.bandwidth_bytes_per_s * spec.achieved_bandwidth["pointwise"]
    restored_s = max(moved_bytes / rate, spec.dispatch_s) + spec.launch_s
    return replace(
        layer,
        weight_bytes=stored_bytes,
        workspace_bytes=layer.workspace_bytes + HALF_BYTES * weights,
        forward_s=layer.forward_s + restored_s,
        # The first block's inputs need no gradient, nor therefore its weights in a backward.
        backward_s=layer.backward_s + restored_s if layer.backward_s else 0.0,
    )
